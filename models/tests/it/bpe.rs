//! Our own encoder gives what the `tokenizers` crate gives.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use models::Tokenizer;
use proptest::prelude::*;
use proptest::sample::select;

use crate::text::demo_dir;

/// Another tokenizer to try, such as the real Qwen3's.
const OTHER: &str = "KVFERRY_TEST_TOKENIZER";

/// A folder of texts, or a text, that are tokenized as well.
const TEXTS: &str = "KVFERRY_TEST_TEXTS";

struct Both {
    ours: Tokenizer,
    library: tokenizers::Tokenizer,
}

fn both() -> &'static Both {
    static BOTH: std::sync::OnceLock<Both> = std::sync::OnceLock::new();
    BOTH.get_or_init(|| {
        let dir = std::env::var_os(OTHER).map_or_else(demo_dir, PathBuf::from);
        let library = tokenizers::Tokenizer::from_file(dir.join("tokenizer.json")).unwrap();
        Both { ours: Tokenizer::load(&dir).unwrap(), library }
    })
}

fn assert_same(text: &str) {
    let Both { ours, library } = both();
    let ids = ours.encode(text, true).unwrap();
    let expected = library.encode_fast(text, true).unwrap();
    if ids != expected.get_ids() {
        let at = ids.iter().zip(expected.get_ids()).position(|(a, b)| a != b).unwrap_or(0);
        let before = ours.decode(&ids[..at], false);
        panic!("{text:?}: after {before:?} {:?}, expected {:?}", &ids[at..], &expected.get_ids()[at..]);
    }
}

/// Pieces that the splitting pattern, NFC and the added tokens treat each in their own way.
fn piece() -> impl Strategy<Value = String> {
    let fixed = select(vec![
        " ",
        "  ",
        "   ",
        "\t",
        "\n",
        "\r\n",
        "\r",
        "\u{b}",
        "\u{85}",
        "\u{a0}",
        "\u{2028}",
        "\u{3000}",
        "\u{feff}",
        "\u{200b}",
        "\u{200d}",
        "'",
        "'s",
        "'S",
        "'ll",
        "'LL",
        "'Re",
        "'ve",
        "'d",
        "'m",
        "'t",
        "'\u{17f}",
        "\u{2019}s",
        "<|im_start|>",
        "<|im_end|>",
        "<|im_",
        "|>",
        "<",
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<|endoftext|>",
        "<|fim_prefix|>",
        "<<|im_end|>>",
        "the",
        "The",
        " the",
        "hello",
        "fn",
        "() {",
        "}",
        "==",
        "->",
        "//",
        "/*",
        "...",
        "!?",
        "_",
        "-",
        "$",
        "1",
        "12",
        "2026",
        "½",
        "٣",
        "Ⅷ",
        "²",
        "é",
        "e\u{301}",
        "\u{301}",
        "a\u{323}\u{307}",
        "a\u{307}\u{323}",
        "\u{212b}",
        "\u{f900}",
        "\u{2126}",
        "ﬁ",
        "你好",
        "，",
        "世界",
        "日本語",
        "カ\u{3099}",
        "한국어",
        "\u{1112}\u{1161}\u{11ab}",
        "\u{ac00}\u{11a8}",
        "हिन्दी",
        "தமிழ்",
        "ไทย",
        "עברית",
        "\u{5d0}\u{5b7}",
        "العربية",
        "кириллица",
        "ελληνικά",
        "🫠",
        "👨‍👩‍👧",
        "🇩🇪",
        "👍🏽",
        "𝔘𝔫𝔦",
        "𠮷",
        "\u{1d15e}",
        "\u{0344}",
        "\u{0}",
        "\u{7f}",
    ])
    .prop_map(str::to_owned);
    prop_oneof![
        8 => fixed,
        2 => "[a-z]{1,12}",
        1 => "[A-Za-z0-9_]{1,20}",
        1 => "\\PC{1,6}",
        1 => any::<char>().prop_map(String::from),
        1 => (0x300_u32..0x370).prop_map(|c| char::from_u32(c).unwrap().to_string()),
        1 => (0x1100_u32..0x1200).prop_map(|c| char::from_u32(c).unwrap().to_string()),
        1 => (0x4e00_u32..0x9fff).prop_map(|c| char::from_u32(c).unwrap().to_string()),
        1 => "[ \t\n\r]{1,8}",
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn pieces_in_any_order_are_tokenized_as_by_the_library(pieces in prop::collection::vec(piece(), 0..24)) {
        assert_same(&pieces.concat());
    }

    #[test]
    fn any_text_is_tokenized_as_by_the_library(text in any::<String>()) {
        assert_same(&text);
    }
}

/// Long words take another way through the merges than short ones.
#[test]
fn words_of_any_length_are_tokenized_as_by_the_library() {
    let mut state = 1_u64;
    let mut next = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let alphabets =
        ["ab", "etaoin shrdlu", "abcdefghijklmnopqrstuvwxyz", "一丁七万丈三上下不与", "=-", "ééàüß", "🫠🥹"];
    for length in (1..200).chain([500, 5_000]) {
        for alphabet in alphabets {
            let chars: Vec<char> = alphabet.chars().collect();
            let text: String = (0..length).map(|_| chars[next(chars.len() as u64) as usize]).collect();
            assert_same(&text);
        }
    }
    assert_same(&"a".repeat(10_000));
    assert_same(&"the".repeat(3_000));
}

#[test]
fn every_character_is_tokenized_as_by_the_library() {
    let mut text = String::new();
    // Planes without characters, and those for private use, are all alike.
    let assigned =
        |c: &char| matches!(*c as u32, 0..0x3_2000 | 0xe_0000..0xe_0200) || (*c as u32).is_multiple_of(257);
    for c in ('\0'..=char::MAX).filter(assigned) {
        // Between letters, between spaces, after itself.
        writeln!(text, "a{c}b {c} {c}{c}").unwrap();
        if text.len() > 4096 {
            assert_same(&text);
            text.clear();
        }
    }
    assert_same(&text);
}

#[test]
fn the_repositorys_texts_are_tokenized_as_by_the_library() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = vec![
        root.join("demo/train"),
        root.join("src"),
        root.join("../kernels/cu"),
        root.join("../README.md"),
    ];
    files.extend(std::env::var_os(TEXTS).map(PathBuf::from));
    let mut bytes = 0;
    while let Some(path) = files.pop() {
        if path.is_dir() {
            files.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if let Ok(text) = std::fs::read_to_string(&path) {
            bytes += text.len();
            assert_same(&text);
            text.lines().for_each(assert_same);
        }
    }
    assert!(bytes > 100_000, "{bytes} bytes of text were found");
}

#[test]
fn the_demos_tokenizer_is_known() {
    assert!(both().ours.is_fast());
}

/// Each setting that our encoder does not know leaves a tokenizer to the library.
#[test]
fn another_tokenizer_was_taken_for_one_that_is_known() {
    let json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(demo_dir().join("tokenizer.json")).unwrap()).unwrap();
    let changes: [(&str, serde_json::Value); 8] = [
        ("/normalizer", serde_json::json!({"type": "NFKC"})),
        ("/normalizer", serde_json::Value::Null),
        ("/pre_tokenizer/pretokenizers/0/pattern/Regex", r"\p{L}+|\p{N}{1,3}|\s+|[^\s]".into()),
        ("/pre_tokenizer/pretokenizers/0/behavior", "Removed".into()),
        ("/pre_tokenizer/pretokenizers/1/add_prefix_space", true.into()),
        ("/model/ignore_merges", true.into()),
        ("/added_tokens/0/lstrip", true.into()),
        ("/added_tokens/1/normalized", true.into()),
    ];
    for (place, value) in changes {
        let mut json = json.clone();
        *json.pointer_mut(place).unwrap_or_else(|| panic!("{place} is there")) = value;
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        let library = tokenizers::Tokenizer::from_file(dir.path().join("tokenizer.json")).unwrap();
        let ours = Tokenizer::load(dir.path()).unwrap();
        assert!(!ours.is_fast(), "{place}");
        let text = "Hi, it's  12 <|im_end|> ﬁne\n";
        assert_eq!(
            ours.encode(text, true).unwrap(),
            library.encode_fast(text, true).unwrap().get_ids(),
            "{place}"
        );
    }
}
