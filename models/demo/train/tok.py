"""Train the demo tokenizer: byte-level BPE, 4,096 tokens, Qwen3's pre-tokenizer and added tokens.
usage: tok.py TEXTFILE QAFILE OUTDIR"""
import json, sys
from pathlib import Path
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

# Same contents and order as Qwen3's 151643..151668; the first 14 are "special" (skipped when decoding).
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
           "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
           "<|image_pad|>", "<|video_pad|>"]
ADDED = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
         "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def build(corpus, vocab):
    """A trained tokenizer of `vocab` tokens in all, added tokens last, as in Qwen3."""
    t = Tokenizer(models.BPE(byte_fallback=False))
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)])
    t.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    t.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    t.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=vocab - len(SPECIAL) - len(ADDED), min_frequency=2, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    t.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    t.add_tokens([AddedToken(s, special=False, normalized=False) for s in ADDED])
    return t


def config(t):
    """tokenizer_config.json with the keys of Qwen3's; the chat template has a file of its own."""
    return dict(
        add_bos_token=False, add_prefix_space=False,
        added_tokens_decoder={str(t.token_to_id(s)): dict(content=s, lstrip=False, normalized=False, rstrip=False,
                              single_word=False, special=s in SPECIAL) for s in SPECIAL + ADDED},
        additional_special_tokens=SPECIAL[1:], bos_token=None,
        clean_up_tokenization_spaces=False, eos_token="<|im_end|>", errors="replace", model_max_length=4096,
        pad_token="<|endoftext|>", split_special_tokens=False, tokenizer_class="Qwen2Tokenizer", unk_token=None)


if __name__ == "__main__":
    text, qa, out = Path(sys.argv[1]).read_text(encoding="utf-8"), sys.argv[2], Path(sys.argv[3])
    lines = [json.loads(l) for l in open(qa, encoding="utf-8")]
    project = "\n".join("\n".join(l["q"] + [l["t"]] * 2 + [l["a"]] * 4) for l in lines)
    # The project's words are few against 9 MB of old English: weigh them up, so that the words
    # that the demo is about become one or two tokens each.
    t = build([text] + [project] * 60, 4096)
    assert t.get_vocab_size() == 4096 and t.token_to_id("<|endoftext|>") == 4096 - 26
    t.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(config(t), indent=2, ensure_ascii=False) + "\n")
    n = len(t.encode(project).ids)
    print("project: characters per token", len(project) / n, "text:", 200000 / len(t.encode(text[:200000]).ids))
