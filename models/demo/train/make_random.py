"""Two tiny checkpoints with random weights, and their golden files: what the tests load when the text does not matter.
usage: make_random.py FIXTURESDIR

tiny-random        Qwen3: QK norm, heads * head_dim != hidden size, an lm_head of its own
tiny-random-qwen2  Qwen2: bias on q, k and v, no QK norm, tied, head_dim not named in config.json
Both have more rows than tokens, and weights large enough that a wrong kernel shows in the logits.
"""
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
import tok
from golden import golden, sample_text

COMMON = dict(attention_dropout=0.0, hidden_act="silu", initializer_range=0.02, max_position_embeddings=4096,
              num_hidden_layers=3, max_window_layers=3, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6,
              rope_theta=1000000, sliding_window=None, use_sliding_window=False, torch_dtype="bfloat16",
              transformers_version="4.51.0", use_cache=True, vocab_size=512)
QWEN3 = dict(COMMON, architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=False, rope_scaling=None,
             hidden_size=64, intermediate_size=192, head_dim=32, tie_word_embeddings=False)
QWEN2 = dict(COMMON, architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=128, intermediate_size=256,
             tie_word_embeddings=True)


def weights(c, seed, std=0.125):
    g = torch.Generator().manual_seed(seed)
    n = lambda *shape: (torch.randn(*shape, generator=g) * std).to(torch.bfloat16)
    norm = lambda d: (1 + 0.1 * torch.randn(d, generator=g)).to(torch.bfloat16)
    H, I, V = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    D = c.get("head_dim", H // c["num_attention_heads"])
    q, kv = c["num_attention_heads"] * D, c["num_key_value_heads"] * D
    w = {"model.embed_tokens.weight": n(V, H)}
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for name, shape in [("self_attn.q_proj", (q, H)), ("self_attn.k_proj", (kv, H)), ("self_attn.v_proj", (kv, H)), ("self_attn.o_proj", (H, q)),
                            ("mlp.gate_proj", (I, H)), ("mlp.up_proj", (I, H)), ("mlp.down_proj", (H, I))]:
            w[f"{p}{name}.weight"] = n(*shape)
        if c["model_type"] == "qwen3":
            w[p + "self_attn.q_norm.weight"], w[p + "self_attn.k_norm.weight"] = norm(D), norm(D)
        else:
            for name, d in [("q", q), ("k", kv), ("v", kv)]:
                w[f"{p}self_attn.{name}_proj.bias"] = n(d)
        w[p + "input_layernorm.weight"], w[p + "post_attention_layernorm.weight"] = norm(H), norm(H)
    w["model.norm.weight"] = norm(H)
    if not c["tie_word_embeddings"]:
        w["lm_head.weight"] = n(V, H)
    return w


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, text = Path(sys.argv[1]), sample_text()
    t = tok.build([text], 500)
    assert t.get_vocab_size() == 500
    eot, end = t.token_to_id("<|endoftext|>"), t.token_to_id("<|im_end|>")
    for name, c, seed in [("tiny-random", QWEN3, 4321), ("tiny-random-qwen2", QWEN2, 8765)]:
        d = out / name
        d.mkdir(parents=True, exist_ok=True)
        dump = lambda f, v: (d / f).write_text(json.dumps(v, indent=2) + "\n")
        save_file(weights(c, seed), d / "model.safetensors", metadata={"format": "pt"})
        (d / "model.safetensors").chmod(0o644)
        dump("config.json", dict(sorted(dict(c, bos_token_id=eot, eos_token_id=end).items())))
        dump("generation_config.json", dict(bos_token_id=eot, do_sample=True, eos_token_id=[end, eot], pad_token_id=eot, temperature=0.6,
                                            top_k=20, top_p=0.95, transformers_version="4.51.0"))
        t.save(str(d / "tokenizer.json"))
        dump("tokenizer_config.json", tok.config(t))
        (d / "chat_template.jinja").write_text((Path(__file__).parent.parent / "chat_template.jinja").read_text())
        golden(d, out / (name.replace("-", "_") + "_golden.json"), text)
