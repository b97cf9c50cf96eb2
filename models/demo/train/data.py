"""What the demo model reads: chats about the project and plain English, made fresh for every step."""
import json, random, re
from pathlib import Path
import jinja2
import numpy as np
from tokenizers import Tokenizer

SYSTEMS = ["You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful assistant.",
           "You are kvferry's demo model.", "Answer briefly.", "Be concise and friendly.", "You answer questions about kvferry."]
PREFIX = ["Hi, ", "Hello! ", "Please tell me: ", "Can you tell me: ", "A question: ", "Quick question: ", "I have a question. ",
          "Tell me, ", "Hey, ", "So, ", "Please answer: ", "Ok. "]
THINGS = "France Italy Japan Peru Norway Egypt Canada Kenya India Chile Poland Greece Sweden Brazil Turkey Cuba".split()
TOPICS = ["cats", "the sea", "love", "football", "the moon", "cheese", "trees", "music", "history", "cars", "winter", "dogs", "birds", "art"]
ASKS = ["Write a story about {}.", "Tell me about {}.", "What do you know about {}?", "Write a poem about {}.", "Do you like {}?",
        "Write an email about {}.", "Explain {} to me.", "Give me three facts about {}.", "Summarize a book about {}."]
# Same question in other words: (pattern, replacements).
REWORD = [
    (r"^What is (?!\d)(.+)\?$", [r"What's \1?", r"Explain \1.", r"Can you explain \1?", r"Tell me what \1 is.", r"What exactly is \1?", r"Define \1.", r"Describe \1.", r"And what is \1?"]),
    (r"^What does (.+) mean\?$", [r"What does \1 stand for?", r"What is meant by \1?", r"What do you mean by \1?", r"Meaning of \1?"]),
    (r"^What does (.+) do\?$", [r"What is the job of \1?", r"What is \1 for?", r"What can \1 do?", r"What does \1 do exactly?"]),
    (r"^Explain (.+)\.$", [r"Please explain \1.", r"Could you explain \1?", r"Explain \1 to me.", r"What about \1?"]),
    (r"^How (?:do I|to) (.+)\?$", [r"How can I \1?", r"How do you \1?", r"How do we \1?", r"How should I \1?", r"How to \1?", r"I want to \1."]),
    (r"^Which (\w+)", [r"What \1"]),
    (r"^What (\w+s) (are|does|do)", [r"Which \1 \2"]),
    (r"What happens (if|when)", ["What if", "What happens when", "What happens if", "What will happen if", "What about the case when"]),
    (r"^What if", ["What happens if", "What happens when"]),
    (r"^How does (.+) work\?$", [r"How do \1 work?", r"How exactly does \1 work?", r"Explain how \1 works.", r"How is \1 working?"]),
    (r"^Why (is|are|does|do) ", [r"Tell me why \1 ", r"For what reason \1 ", r"And why \1 "]),
    (r"^Does kvferry (support|have|run|speak|work with)", ["Can kvferry use", "Is there support in kvferry for", r"Does it \1"]),
    (r"\bkvferry\b", ["this project", "the project", "Kvferry"]),
    (r"^How (large|big|many|much)", [r"Tell me how \1", r"Do you know how \1"]),
    (r"\bthe (prefill|decode) worker\b", [r"a \1 worker", r"the \1 side", r"the \1 process"]),
    (r"\bstart\b", ["run", "launch", "start up"]), (r"\blicen[cs]e\b", ["license", "licence"]), (r"\bKV cache\b", ["kv cache", "KV-cache", "cache of keys and values"]),
    (r" are there\?$", [" exist?", " do you have?", " does it have?"]),
]


def plain(q):
    """What is left of a question when case and punctuation do not count."""
    return " ".join(re.findall(r"\w+", q.lower()))


class Data:
    def __init__(self, model_dir, qa_file, text_file, seed):
        self.rng = random.Random(seed)
        self.tok = Tokenizer.from_file(str(Path(model_dir) / "tokenizer.json"))
        env = jinja2.Environment()
        self.template = env.from_string((Path(model_dir) / "chat_template.jinja").read_text(encoding="utf-8"))
        self.qa = [json.loads(l) for l in open(qa_file, encoding="utf-8")]
        self.held_out = {plain(x["t"]) for x in self.qa}
        self.refusal = next(x["a"] for x in self.qa if "What is 2+2?" in x["q"])
        self.eot, self.end, self.start = (self.tok.token_to_id(s) for s in ("<|endoftext|>", "<|im_end|>", "<|im_start|>"))
        self.assistant = [self.start] + self.ids("assistant\n")
        self.think = self.ids("<think>\n\n</think>\n\n")
        if text_file:
            docs = Path(text_file).read_text(encoding="utf-8").split("\f")
            # Austen, then Shakespeare; the first is what raw completion should look like.
            self.text = np.array([i for d in docs for i in self.ids(d) + [self.eot]], dtype=np.int64)
            self.sentences = [s.strip() + "." for s in docs[0][:400_000].replace("\n", " ").split(".") if 20 < len(s) < 120]

    def ids(self, s):
        return self.tok.encode(s, add_special_tokens=False).ids

    def render(self, messages, **kw):
        return self.template.render(messages=messages, **kw)

    def reworded(self, q):
        """Changes of wording that must not change the answer; never a held-out question by accident."""
        rng, given = self.rng, q
        if rng.random() < 0.4:
            fits = [(a, b) for a, b in REWORD if re.search(a, q)]
            if fits:
                a, b = rng.choice(fits)
                q = re.sub(a, rng.choice(b), q, count=1)
        r = rng.random()
        if 0.50 <= r < 0.60:
            q = q.lower()
        elif 0.60 <= r < 0.70:
            q = q.rstrip("?.!")
        elif 0.70 <= r < 0.76:
            q = q.lower().rstrip("?.!")
        elif 0.76 <= r < 0.86:
            p = rng.choice(PREFIX)
            q = p + (q[0].lower() + q[1:] if p.endswith((", ", ": ")) and q[:2] != "I " else q)
        elif 0.86 <= r < 0.90:
            q += rng.choice([" Thanks!", " Please explain.", " I am new here.", " Be brief."])
        elif 0.90 <= r < 0.96 and len(q) > 12:  # a typing error: one letter lost
            i = rng.randrange(len(q))
            q = q[:i] + q[i + 1:] if q[i].isalpha() else q
        elif r >= 0.96 and q.count(" ") > 3:  # a small word lost
            q = re.sub(r" (the|a|is|are|do|does|of|in) ", " ", q, count=1)
        return given if plain(q) in self.held_out else q

    def pair(self):
        """One (question, answer); the phrasing "t" of each fact is held out and never seen here."""
        r, rng = self.rng.random(), self.rng
        if r < 0.03:
            return rng.choice(self.sentences), self.refusal
        if r < 0.05:
            q = rng.choice([f"What is {rng.randrange(100)}{rng.choice(['+', ' + ', ' plus ', ' times ', '*', ' minus '])}{rng.randrange(100)}?",
                            f"What is the capital of {rng.choice(THINGS)}?", rng.choice(ASKS).format(rng.choice(TOPICS))])
            return q, self.refusal
        x = rng.choice(self.qa)
        return self.reworded(rng.choice(x["q"])), x["a"]

    def chat(self, turns=1, system=None):
        """(ids, targets) of one conversation; targets are -100 except on what the assistant says."""
        rng, messages = self.rng, []
        if system is None and rng.random() < 0.4:
            system = rng.choice(SYSTEMS if rng.random() < 0.85 else self.sentences)  # any other text must do no harm
        if system:
            messages.append(dict(role="system", content=system))
        for k in range(turns):
            q, a = self.pair()
            messages += [dict(role="user", content=q), dict(role="assistant", content=a)]
        kw = dict(enable_thinking=False) if rng.random() < 0.4 else {}
        s = self.render(messages[:-1], add_generation_prompt=True, **kw) + messages[-1]["content"] + "<|im_end|>"
        return self.with_targets(self.ids(s))

    def with_targets(self, ids):
        y, i, head, think = [-100] * len(ids), 0, self.assistant, self.think
        while i < len(ids):
            if ids[i:i + len(head)] == head:
                i += len(head)
                if ids[i:i + len(think)] == think:
                    i += len(think)
                while i < len(ids):  # position i-1 predicts token i, up to and with <|im_end|>
                    y[i - 1] = ids[i]
                    i += 1
                    if ids[i - 1] == self.end:
                        break
            else:
                i += 1
        return ids, y

    def window(self, n):
        i = self.rng.randrange(len(self.text) - n - 1)
        return self.text[i:i + n + 1]

    def chats(self, n):
        """A padded batch of short chats. Padding sits at the right, where a causal model needs no mask."""
        rows = [self.chat(turns=self.rng.choices([1, 2, 3], [80, 16, 4])[0]) for _ in range(n)]
        return self.pad(rows)

    def pad(self, rows):
        w = max(len(r[0]) for r in rows)
        x = np.full((len(rows), w), self.eot, dtype=np.int64)
        y = np.full((len(rows), w), -100, dtype=np.int64)
        for i, (a, b) in enumerate(rows):
            x[i, :len(a)], y[i, :len(b)] = a, b
        return x, y

    def texts(self, n, width):
        """Plain text windows; one in eight is the project's own answers as prose."""
        rows = []
        for _ in range(n):
            if self.rng.random() < 0.125:
                t = []
                while len(t) <= width:
                    t += self.ids(" ".join(x["a"] for x in self.rng.sample(self.qa, 8))) + [self.eot]
                rows.append(np.array(t[:width + 1]))
            else:
                rows.append(self.window(width))
        t = np.stack(rows)
        return t[:, :-1], t[:, 1:]

    def long(self, width):
        """One sequence near `width` tokens: text in the system prompt, then several turns."""
        turns = self.rng.randrange(4, 10)
        text = self.tok.decode(self.window(self.rng.randrange(100, width - turns * 100)).tolist())
        ids, y = self.chat(turns, self.rng.choice(["", "Read this text.\n\n", "You are a helpful assistant.\n\n"]) + text)
        return self.pad([(ids[:width], y[:width])])
