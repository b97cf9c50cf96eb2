#!/usr/bin/env python3
"""Prefill and decode of `transformers` on torch (sdpa), at the sizes of `bench engine`.

    python3 -m venv V && V/bin/pip install torch transformers   # a CPU build of torch will do
    V/bin/python scripts/bench-peers.py MODEL_DIR [--dtype bfloat16] [--threads N] [--prompt-tokens 512,1500,3000] [--batch 1,8] [--context 512]

Run it right before or after `bench engine --model MODEL_DIR` on an otherwise idle machine; only ratios mean something.
"""

import argparse
import json
import time

import torch
from transformers import AutoModelForCausalLM


def numbers(text):
    return [int(word) for word in text.split(",")]


def tokens(model, rows, count):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (rows, count), generator=generator)


def best(rounds, run):
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def decode_step(model, batch, context, steps):
    """Milliseconds of a step of `batch` sequences with `context` tokens before it."""
    past = model(tokens(model, batch, context), use_cache=True, logits_to_keep=1).past_key_values
    following = tokens(model, batch, 1)

    def run():
        model(following, past_key_values=past, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)

    return best(steps, run) * 1e3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prompt-tokens", type=numbers, default=[512, 1500, 3000])
    parser.add_argument("--batch", type=numbers, default=[1, 8])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype), attn_implementation="sdpa").eval()
    with torch.inference_mode():
        for count in args.prompt_tokens:
            prompt = tokens(model, 1, count)
            seconds = best(args.rounds, lambda: model(prompt, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1))
            print(json.dumps({"phase": "prefill", "tokens": count, "ms": round(seconds * 1e3, 1)}), flush=True)
        for batch in args.batch:
            ms = decode_step(model, batch, args.context, 15 * args.rounds)
            rate = round(batch / ms * 1e3, 1)
            print(json.dumps({"phase": "decode", "sequences": batch, "ms": round(ms, 1), "tokens/s": rate}), flush=True)


if __name__ == "__main__":
    main()
