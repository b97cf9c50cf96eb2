"""Train the demo model.  usage: train.py MODELDIR QAFILE TEXTFILE [--minutes 44] [--threads 1]

MODELDIR already holds tokenizer.json, chat_template.jinja and config.json; model.safetensors is written
there every few minutes (temp file, then rename) and at the end.
"""
import argparse, math, os, time
from pathlib import Path
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, Qwen3ForCausalLM
from data import Data


def export(model, path):
    """bf16, the tied lm_head left out, names as in every Qwen3 checkpoint."""
    w = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    tmp = path.with_suffix(".tmp")
    save_file(w, tmp, metadata={"format": "pt"})
    os.chmod(tmp, 0o644)
    os.replace(tmp, path)


def loss_of(model, x, y):
    """Mean cross-entropy where y is a token; the head runs only there, it is a quarter of the work."""
    h = model.model(input_ids=torch.from_numpy(x), use_cache=False).last_hidden_state
    y = torch.from_numpy(y)
    keep = y >= 0
    return torch.nn.functional.cross_entropy(model.lm_head(h[keep]).float(), y[keep])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("model"); p.add_argument("qa"); p.add_argument("text")
    p.add_argument("--minutes", type=float, default=44); p.add_argument("--threads", type=int, default=1)
    p.add_argument("--lr", type=float, default=2.5e-3); p.add_argument("--seed", type=int, default=1)
    p.add_argument("--chats", type=int, default=16); p.add_argument("--texts", type=int, default=3)
    a = p.parse_args()
    torch.set_num_threads(a.threads); torch.manual_seed(a.seed)
    out = Path(a.model) / "model.safetensors"
    model = Qwen3ForCausalLM(AutoConfig.from_pretrained(a.model)).float().train()
    model.config._attn_implementation = "sdpa"
    data = Data(a.model, a.qa, a.text, a.seed)
    print("parameters", sum(q.numel() for q in model.parameters()), "text tokens", len(data.text), flush=True)
    export(model, out)
    wide = [q for q in model.parameters() if q.dim() > 1]
    thin = [q for q in model.parameters() if q.dim() == 1]
    opt = torch.optim.AdamW([dict(params=wide, weight_decay=0.05), dict(params=thin, weight_decay=0.0)], betas=(0.9, 0.98))
    begin = shown = saved = time.time()
    step, sums, tokens = 0, [0.0, 0.0, 0], 0
    while True:
        # The schedule follows the clock, not a step count: on a busy machine the run still ends in time.
        done = (time.time() - begin) / (60 * a.minutes)
        if done >= 1:
            break
        lr = a.lr * min(1, (step + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * done))
        for g in opt.param_groups:
            g["lr"] = lr
        # RoPE is relative, so shifting positions teaches nothing; what long prompts need is long contexts,
        # and every eighth step has one.
        if step % 8 == 7:
            jobs = [data.long(2048) if step % 16 == 7 else data.texts(1, 2048), data.chats(a.chats)]
        else:
            jobs = [data.texts(a.texts, 512), data.chats(a.chats)]
        for i, (x, y) in enumerate(jobs):
            l = loss_of(model, x, y)
            (l * (0.5 if i == 0 else 1.0)).backward()
            sums[i] += l.item(); tokens += x.size
        sums[2] += 1
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step(); opt.zero_grad(set_to_none=True)
        step += 1
        now = time.time()
        if now - shown > 20:
            print(f"step {step} {now - begin:.0f}s lr {lr:.2e} text {sums[0] / sums[2]:.3f} chat {sums[1] / sums[2]:.4f} tok/s {tokens / (now - shown):.0f}", flush=True)
            shown, sums, tokens = now, [0.0, 0.0, 0], 0
        if now - saved > 180:
            export(model, out); saved = now
    export(model, out)
    print("steps", step, "seconds", time.time() - begin)


if __name__ == "__main__":
    main()
