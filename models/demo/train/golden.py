"""Golden answers from transformers, in f32 with eager attention (weights: the bf16 file, widened).
usage: golden.py MODELDIR OUT.json

    prompts       input_ids; last_logits (rounded to 1e-6); argmax at every position; a greedy continuation of
                  32 tokens that ignores EOS and never takes a row without a token; its margins (best minus second best logit)
    tokenization  text -> ids, and ids -> text without special tokens
    chat          messages -> rendered -> ids
"""
import hashlib, json, random, sys
from pathlib import Path
import jinja2, torch, transformers
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

TEXTS = [
    "What is kvferry?", "", " ", "\n", "a", "Hello, world!", "  leading and trailing  ", "tabs\tand\n\n\nnewlines \n  \n x\r\n\r\ny",
    "it's I'VE we'll they'd CAN'T", "1234567890 3.14159 1,000,000 v1.2.3", "naïve café résumé", "cafe\u0301 A\u030a \u1e9b\u0323 (combining marks)",
    "日本語のテキスト、漢字とかな。", "你好，世界！", "한국어 문장", "مرحبا بالعالم", "नमस्ते दुनिया", "😀👍🏽 👨‍👩‍👧‍👦 🇫🇷", "ﬁ ½ ² Ⅷ ™ …", "\u200b\ufeff\u00a0nbsp",
    "fn main() {\n    let x: Vec<u8> = vec![0; 16];\n\tprintln!(\"{x:?}\");\n}\n", "https://127.0.0.1:8000/v1/chat/completions?x=1&y=%20",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|endoftext|><|im_end|>x<tool_call>{}</tool_call>",
    "<|im_start|", "<think>a</think>b <|fim_prefix|>c<|file_sep|>", "----====####    ____", "\x00\x01\x7f", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "…—“quoted”—‘x’",
]
Q, A = dict(role="user", content="What is kvferry?"), dict(role="assistant", content="A runtime.")
SYS = dict(role="system", content="You are a helpful assistant.")
MORE = dict(role="user", content="  And what is a ticket?\n")
THOUGHT = dict(role="assistant", content="<think>\nLet me see.\n</think>\n\nA handoff.")
CHATS = [
    ([Q], {}), ([Q], dict(enable_thinking=False)), ([Q], dict(enable_thinking=True)), ([SYS, Q], {}), ([SYS, Q, A, MORE], {}),
    ([SYS, Q, A, MORE], dict(enable_thinking=False)), ([Q, A], dict(add_generation_prompt=False)),
    ([Q, THOUGHT, MORE], {}), ([Q, THOUGHT], dict(add_generation_prompt=False)),
    ([dict(role="user", content="日本 😀 \"quotes\" & <tags>\n\nnew paragraph")], {}), ([Q, SYS, MORE], {}),
    ([dict(role="system", content="")] + [Q], {}),
]


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def run(model, ids, rows, steps=32):
    """`rows`: how many of the logits have a token; the others are never picked."""
    o = model(torch.tensor([ids]), use_cache=True)
    logits, past = o.logits[0].float(), o.past_key_values
    last, out, margins = logits[-1], [], []
    step = last
    for _ in range(steps):
        two = torch.topk(step[:rows], 2)
        out.append(int(two.indices[0])); margins.append(round(float(two.values[0] - two.values[1]), 6))
        o = model(torch.tensor([[out[-1]]]), past_key_values=past, use_cache=True)
        step, past = o.logits[0, -1].float(), o.past_key_values
    full = model(torch.tensor([ids + out[:-1]]), use_cache=False).logits[0, len(ids) - 1:, :rows].argmax(-1).tolist()
    assert full == out or min(margins) < 1e-3, "cached and uncached runs differ"
    return dict(input_ids=ids, last_logits=[round(v, 6) for v in last.tolist()], argmax=logits.argmax(-1).tolist(),
                greedy=out, margins=margins)


def steadiest(model, prompts, rows):
    """Of some prompts the one with the largest smallest margin: noise must not change its text."""
    return max((run(model, ids, rows) for ids in prompts), key=lambda r: min(r["margins"]))


def some(length, rows, tries):
    rng = random.Random(length)
    return [[rng.randrange(rows) for _ in range(length)] for _ in range(tries)]


def golden(path, out, text, tries=24):
    path = Path(path)
    tok, model = Tokenizer.from_file(str(path / "tokenizer.json")), load(path)
    rows = tok.get_vocab_size()
    template = path / "chat_template.jinja"
    if not template.exists():  # the random checkpoints share the demo model's
        template = Path(__file__).parent.parent / "chat_template.jinja"
    template = jinja2.Environment().from_string(template.read_text(encoding="utf-8"))
    enc = lambda s: tok.encode(s, add_special_tokens=False).ids
    render = lambda m, kw: template.render(messages=m, **{"add_generation_prompt": True, **kw})
    prompts = [dict(name="chat", **run(model, enc(render([Q], {})), rows)),
               dict(name="chat_no_think", **run(model, enc(render([SYS, dict(role="user", content="Why are prefill and decode in separate processes?")],
                                                              dict(enable_thinking=False))), rows)),
               dict(name="random_40", **steadiest(model, some(40, rows, tries), rows)),
               dict(name="text_300", **steadiest(model, [enc(text)[:n] for n in range(300, 300 + tries)], rows)),
               dict(name="text_700", **steadiest(model, [enc(text)[:n] for n in range(700, 700 + tries // 2)], rows)),
               dict(name="single", **steadiest(model, some(1, rows, tries), rows))]
    g = dict(sha256=hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest(), torch=torch.__version__.split("+")[0],
             transformers=transformers.__version__, dtype="float32", attention="eager", tokens=rows, prompts=prompts,
             tokenization=[dict(text=t, ids=enc(t), decoded=tok.decode(enc(t), skip_special_tokens=True)) for t in TEXTS],
             chat=[dict(messages=m, **{"add_generation_prompt": True, **kw}, rendered=render(m, kw), ids=enc(render(m, kw))) for m, kw in CHATS])
    s = json.dumps(g, ensure_ascii=True)
    for key in ("prompts", "tokenization", "chat"):  # one entry a line: readable diffs, small file
        s = s.replace(f'"{key}": [', f'\n"{key}": [\n')
    s = s.replace('}, {"name"', '},\n{"name"').replace('}, {"text"', '},\n{"text"').replace('}, {"messages"', '},\n{"messages"')
    assert json.loads(s) == json.loads(json.dumps(g))
    tmp = Path(str(out) + ".tmp"); tmp.write_text(s + "\n"); tmp.replace(out)
    for p in prompts:
        print(p["name"], len(p["input_ids"]), "min margin", min(p["margins"]), repr(tok.decode(p["greedy"])))


def sample_text():
    """Prose of our own, long enough for 700 tokens: the answers of qa.jsonl."""
    return " ".join(json.loads(l)["a"] for l in open(Path(__file__).parent / "qa.jsonl", encoding="utf-8"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    golden(sys.argv[1], sys.argv[2], sample_text())
