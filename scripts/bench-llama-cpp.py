#!/usr/bin/env python3
"""Prefill and decode of llama.cpp (BF16), at the sizes of `bench engine`, through its C library.

    npm install --no-save @node-llama-cpp/linux-x64        # llama.cpp built for every CPU, 30 MB
    python3 -m venv V && V/bin/pip install gguf numpy
    V/bin/python scripts/bench-llama-cpp.py MODEL_DIR node_modules/@node-llama-cpp/linux-x64/bins/linux-x64 [--threads N]
        [--prompt-tokens 512,1500,3000] [--batch 1,8] [--context 512]

The checkpoint (Qwen3, bf16) becomes a GGUF file beside it, once. Run it right before or after `bench engine --model MODEL_DIR`
on an otherwise idle machine; only ratios mean something.
"""

import argparse
import ctypes
import glob
import json
import mmap
import os
import struct
import time

import gguf
import numpy as np

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    name = name.removesuffix(".weight").removeprefix("model.")
    if name.startswith("layers."):
        _, layer, part = name.split(".", 2)
        return f"blk.{layer}.{LAYER[part]}.weight"
    return {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[name] + ".weight"


def convert(model, out):
    """Writes the weights as they are, norms as f32; no vocabulary, because token ids are all that is measured."""
    with open(os.path.join(model, "config.json")) as file:
        config = json.load(file)
    writer = gguf.GGUFWriter(out, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(config["rope_theta"]))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for path in sorted(glob.glob(os.path.join(model, "*.safetensors"))):
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        (size,) = struct.unpack("<Q", data[:8])
        for name, tensor in json.loads(data[8 : 8 + size]).items():
            if name == "__metadata__" or (name == "lm_head.weight" and config["tie_word_embeddings"]):
                continue
            assert tensor["dtype"] == "BF16", f"{name} is {tensor['dtype']}, expected BF16"
            first, end = tensor["data_offsets"]
            words = np.frombuffer(data, np.uint16, (end - first) // 2, 8 + size + first).reshape(tensor["shape"])
            if words.ndim == 1:
                writer.add_tensor(gguf_name(name), (words.astype(np.uint32) << 16).view(np.float32))
            else:
                kind = gguf.GGMLQuantizationType.BF16
                writer.add_tensor(gguf_name(name), words.view(np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Params(ctypes.Structure):
    """Parameters by value; larger than any version's, whose callee reads its part of it."""

    _fields_ = [("words", ctypes.c_int32 * 256)]


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


class Llama:
    def __init__(self, folder, path, threads, context, sequences):
        def load(name):
            return ctypes.CDLL(sorted(glob.glob(os.path.join(folder, name)))[0], mode=ctypes.RTLD_GLOBAL)

        load("libggml-base*.so*")
        ggml = load("libggml.*so*")
        self.lib = lib = load("libllama.*so*")
        ggml.ggml_backend_load_all_from_path(folder.encode())
        lib.llama_backend_init()
        for name in ("llama_model_default_params", "llama_context_default_params"):
            getattr(lib, name).restype = Params
        for name in ("llama_model_load_from_file", "llama_init_from_model", "llama_get_memory", "llama_get_logits_ith"):
            getattr(lib, name).restype = ctypes.c_void_p
        lib.llama_batch_init.restype = Batch
        lib.llama_decode.argtypes = [ctypes.c_void_p, Batch]
        lib.llama_memory_clear.argtypes = [ctypes.c_void_p, ctypes.c_bool]
        lib.llama_get_memory.argtypes = [ctypes.c_void_p]
        lib.llama_get_logits_ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Params]
        lib.llama_init_from_model.argtypes = [ctypes.c_void_p, Params]
        model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        assert model, f"llama.cpp does not load {path}"
        params = lib.llama_context_default_params()
        # n_ctx, n_batch, n_ubatch, n_seq_max: the first fields of every version so far. n_threads and n_threads_batch come
        # somewhere behind, and are the only two that are 4 each unless set; a wrong number of them is several times slower.
        first = list(params.words[:16])
        pairs = [at for at in range(4, 15) if first[at : at + 2] == [4, 4]]
        assert first[:4] == [512, 2048, 512, 1] and len(pairs) == 1, f"unknown parameters {first}"
        params.words[0], params.words[1], params.words[3] = context, 4096, sequences
        params.words[pairs[0]] = params.words[pairs[0] + 1] = threads
        self.context = lib.llama_init_from_model(model, params)
        assert self.context, "llama.cpp makes no context"
        self.memory = lib.llama_get_memory(self.context)

    def run(self, tokens, first, sequences):
        """`tokens` positions from `first` of each sequence; logits of the last."""
        batch = self.lib.llama_batch_init(tokens * sequences, 0, 1)
        for sequence in range(sequences):
            for i in range(tokens):
                at = sequence * tokens + i
                batch.token[at], batch.pos[at] = (7 * at + 11 * first) % 150_000, first + i
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = i + 1 == tokens
        batch.n_tokens = tokens * sequences
        started = time.perf_counter()
        assert self.lib.llama_decode(self.context, batch) == 0
        assert self.lib.llama_get_logits_ith(self.context, -1)
        seconds = time.perf_counter() - started
        self.lib.llama_batch_free(batch)
        return seconds

    def clear(self):
        self.lib.llama_memory_clear(self.memory, True)


def numbers(text):
    return [int(word) for word in text.split(",")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("library", help="folder of libllama and libggml")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompt-tokens", type=numbers, default=[512, 1500, 3000])
    parser.add_argument("--batch", type=numbers, default=[1, 8])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    path = os.path.join(args.model, "model-bf16.gguf")
    if not os.path.exists(path):
        convert(args.model, path + ".part")
        os.rename(path + ".part", path)
    for count in args.prompt_tokens:
        llama = Llama(args.library, path, args.threads, 4096, 1)
        times = []
        for _ in range(args.rounds):
            llama.clear()
            times.append(llama.run(count, 0, 1))
        print(json.dumps({"phase": "prefill", "tokens": count, "ms": round(min(times) * 1e3, 1)}), flush=True)
    for batch in args.batch:
        llama = Llama(args.library, path, args.threads, batch * 1024, batch)
        for _ in range(batch):
            llama.clear()
        llama.run(args.context, 0, batch) if batch * args.context <= 4096 else None
        times = [llama.run(1, args.context + step, batch) for step in range(15 * args.rounds)]
        ms = min(times) * 1e3
        rate = round(batch / ms * 1e3, 1)
        print(json.dumps({"phase": "decode", "sequences": batch, "ms": round(ms, 1), "tokens/s": rate}), flush=True)


if __name__ == "__main__":
    main()
