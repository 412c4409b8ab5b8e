"""A small Llama engine over the pool: many requests at once, K and V in blocks, nothing gathered.

Needs the ``model`` extra (``pip install 'kvpool[model]'``). Import the modules you use:

    gguf_file    ModelFile            what is in a GGUF file, and whether this engine can run it
    tokenizer    Tokenizer            text to tokens and back, chat template
    llama        Llama                the forward pass
    paged        Batch                the rows of one pass, and where their K and V go
    request      Request, Sample      what is asked, and what came of it
    scheduler    Scheduler            who computes what in the next pass
    engine       Engine               passes over whatever the scheduler says
    generate     generate, prefill    the simple ways in: one prompt, or half of one
    sampling     Sampler              greedy or seeded
    beam, speculative                 beam search over forks; drafts out of earlier text

docs/engine.md walks through it. ::

    from kvpool import BlockManager, Pool
    from kvpool.engine.engine import Engine
    from kvpool.engine.gguf_file import ModelFile
    from kvpool.engine.llama import Llama
    from kvpool.engine.request import Request
    from kvpool.engine.tokenizer import Tokenizer

    file = ModelFile("model.gguf")
    model, tokenizer, cfg = Llama(file), Tokenizer(file), file.config
    with Pool(256, n_layers=cfg.n_layers, n_kv_heads=cfg.n_kv_heads, head_dim=cfg.head_dim) as pool:
        with Engine(model, BlockManager(pool)) as engine:
            asked = [
                engine.add(Request(tokenizer.chat(text), stop_tokens=tokenizer.stop_tokens))
                for text in ("Why is the sky blue?", "Who wrote Hamlet?")
            ]
            engine.run()
        for request in asked:
            print(tokenizer.decode(request.samples[0].tokens))
"""
