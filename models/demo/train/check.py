"""How well the demo model knows its answers.  usage: check.py MODELDIR QAFILE [TEXTFILE]

An answer is exact when greedy decoding gives it token for token, <|im_end|> included. One pass over
question and answer tells: every position's argmax must be the next token. The margin (best minus
second best logit) says how much noise an answer stands.
"""
import random, sys
import torch
from transformers import Qwen3ForCausalLM
from data import Data, PREFIX


@torch.no_grad()
def judge(model, data, messages, **kw):
    """(exact, smallest margin) of the last message, given those before it."""
    head = data.ids(data.render(messages[:-1], add_generation_prompt=True, **kw))
    answer = data.ids(messages[-1]["content"]) + [data.end]
    logits = model(torch.tensor([head + answer[:-1]]), use_cache=False).logits[0, len(head) - 1:].float()
    top = torch.topk(logits, 2)
    return top.indices[:, 0].tolist() == answer, float((top.values[:, 0] - top.values[:, 1]).min())


@torch.no_grad()
def greedy(model, data, messages, limit=120, **kw):
    ids = data.ids(data.render(messages, add_generation_prompt=True, **kw)) if not isinstance(messages, str) else data.ids(messages)
    n, past, x = len(ids), None, torch.tensor([ids])
    for _ in range(limit):
        o = model(x, past_key_values=past, use_cache=True)
        past, t = o.past_key_values, int(o.logits[0, -1].argmax())
        if t in (data.end, data.eot):
            break
        ids.append(t); x = torch.tensor([[t]])
    return data.tok.decode(ids[n:])


def main():
    torch.set_num_threads(1)
    path, text = sys.argv[1], sys.argv[3] if len(sys.argv) > 3 else None
    data = Data(path, sys.argv[2], text, 7)
    rng = random.Random(5)
    train = [(q, x["a"]) for x in data.qa for q in x["q"]]
    held = [(x["t"], x["a"]) for x in data.qa]
    user = lambda q: dict(role="user", content=q)
    asst = lambda a: dict(role="assistant", content=a)
    system = dict(role="system", content="You are a helpful assistant.")
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def report(name, cases, m=model):
        r = [(q, *judge(m, data, msgs, **kw)) for q, msgs, kw in cases]
        margins = sorted(x[2] for x in r if x[1])
        miss = [x[0] for x in r if not x[1]]
        print(f"{name}: exact {len(margins)}/{len(r)} = {100 * len(margins) / len(r):.1f} %, margin min {margins[0]:.2f} "
              f"1% {margins[len(margins) // 100]:.2f} median {margins[len(margins) // 2]:.2f}" if margins else name + ": none", flush=True)
        return miss

    plain = [(q, [user(q), asst(a)], {}) for q, a in train]
    print("  wrong:", report("train, plain", plain)[:12])
    report("train, enable_thinking=false", [(q, m, dict(enable_thinking=False)) for q, m, _ in plain])
    report("train, with system prompt", [(q, [system] + m, {}) for q, m, _ in plain])
    report("train, lower case, no mark", [(q, [user(q.lower().rstrip("?.!")), asst(a)], {}) for q, a in train])
    print("  wrong:", report("held out, plain", [(q, [user(q), asst(a)], {}) for q, a in held])[:20])
    report("held out, enable_thinking=false", [(q, [user(q), asst(a)], dict(enable_thinking=False)) for q, a in held])
    two = [(q, [user(p), asst(b), user(q), asst(a)], {}) for (q, a), (p, b) in zip(rng.sample(train, 150), rng.sample(train, 150))]
    report("second turn", two)
    if text:
        long = [(q, [dict(role="system", content=data.tok.decode(data.window(1500).tolist())), user(q), asst(a)], {}) for q, a in rng.sample(train, 40)]
        report("after 1,500 tokens of system text", long)
    half = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    report("train, plain, computed in bf16", plain, half)
    for q in ["What is kvferry?", "Why are prefill and decode in separate processes?", "Hello", "Who are you?", "What is 2+2?", "what is a ticket",
              "How do I start a decode worker?", "What is TTFT?", "What happens if I kill the prefill worker?", "Which transports can I use?",
              "How do I make coffee?", "Can you explain the KV cache to me?"]:
        print("Q:", q, "\nA:", greedy(model, data, [user(q)]))
    for p in ["It was a fine morning, and the young lady", "The KV cache"]:
        print("T:", p, "->", repr(greedy(model, data, p, 60)))


if __name__ == "__main__":
    main()
