"""A small Llama engine over the pool: GGUF weights, NumPy forward pass, paged KV cache.

Needs the ``model`` extra (``pip install 'kvpool[model]'``). Import the modules you use:

    gguf_file   ModelFile            what is in a GGUF file, and whether this engine can run it
    tokenizer   Tokenizer            text to tokens and back, chat template
    llama       Llama                the forward pass
    paged       PagedCache           K and V in the blocks of a BlockManager's sequences
    cache       ContiguousCache      the reference: one array a sequence
    sampling    Sampler              greedy or seeded
    generate    generate             the loop

::

    from kvpool import BlockManager, Pool
    from kvpool.engine.generate import generate
    from kvpool.engine.gguf_file import ModelFile
    from kvpool.engine.llama import Llama
    from kvpool.engine.paged import PagedCache
    from kvpool.engine.tokenizer import Tokenizer

    file = ModelFile("model.gguf")
    model, tokenizer, cfg = Llama(file), Tokenizer(file), file.config
    with Pool(256, n_layers=cfg.n_layers, n_kv_heads=cfg.n_kv_heads, head_dim=cfg.head_dim) as pool:
        cache = PagedCache(BlockManager(pool))
        result = generate(model, cache, tokenizer.chat("Why is the sky blue?"),
                          stop_tokens=tokenizer.stop_tokens)
        print(tokenizer.decode(result.samples[0].tokens))
"""
