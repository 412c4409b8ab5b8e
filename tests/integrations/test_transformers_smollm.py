"""SmolLM2-135M-Instruct in transformers, on the pool: a real model, if its file is installed."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("gguf", reason="needs gguf, to read the model's file")
pytest.importorskip("accelerate", reason="transformers needs accelerate to read a GGUF file")

from kvpool.integrations.transformers import PagedStore  # noqa: E402

SYSTEM = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411]
SYSTEM += [407, 19712, 8182, 2, 198, 1, 4093, 198]  # of SmolLM2's chat template, in its tokens
QUESTIONS = [[1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
             [19556, 28, 638, 359, 346, 47, 2, 198, 1, 520, 9531, 198]]  # fmt: skip


@pytest.fixture(scope="module")
def smollm() -> Any:
    from kvpool.engine.gguf_file import default_model_path

    try:
        path = default_model_path()
    except ValueError as error:
        pytest.skip(str(error))
    transformers.logging.set_verbosity_error()
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32
        )
    return model.eval().requires_grad_(False)


def test_answers_are_those_of_a_dynamic_cache_and_prefixes_are_found(smollm: Any) -> None:
    how = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 2}
    with PagedStore(smollm, n_blocks=32, block_tokens=8) as store:
        for turn, question in enumerate(QUESTIONS):
            ids = torch.tensor([SYSTEM + question])
            expected = smollm.generate(ids, attention_mask=torch.ones_like(ids), **how)
            with store.open(ids) as cache:
                assert cache.n_skipped == (0 if turn == 0 else len(SYSTEM))
                found = smollm.generate(
                    ids, attention_mask=torch.ones_like(ids), cache=cache, **how
                )
            assert found.tolist() == expected.tolist()
        store.manager.check()
        assert store.pool.stats.used == 0
