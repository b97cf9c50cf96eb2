//! The one error of this crate, and the warnings that loading can give.

use std::fmt;
use std::path::PathBuf;

/// How many names of one kind of problem an error spells out. Ten show a pattern (one layer, one
/// shard, one suffix) and still fit a terminal; a checkpoint of 300 tensors may lack all of them.
const LISTED: usize = 10;

/// Problems of one kind, listed together: the first ten, then a count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed(pub Vec<String>);

impl fmt::Display for Listed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self.0.len().min(LISTED);
        f.write_str(&self.0[..shown].join("; "))?;
        match self.0.len() - shown {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

/// Why a model cannot be loaded, or why a text, a conversation or a stop string is refused.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("cannot place the weights on the device: {0}")]
    Device(#[from] candle_core::Error),
    #[error("cannot place the model on the CUDA device: {0}")]
    Cuda(#[from] kernels::cuda::CudaError),
    #[error("{flag} is not supported on {device}, expected {expected}")]
    DeviceDtype { flag: &'static str, device: &'static str, expected: &'static str },
    #[error("model path {path} does not exist")]
    PathNotFound { path: PathBuf },
    #[error("model path {path} is not a folder; give the folder that holds config.json")]
    NotAFolder { path: PathBuf },
    #[error("no {file} in {dir}: this is not a folder of a Hugging Face model{hint}")]
    MissingFile { dir: PathBuf, file: &'static str, hint: String },
    #[error(
        "{name:?} is neither an existing folder, nor `demo`, nor a hub id like Qwen/Qwen3-0.6B: {reason}"
    )]
    BadModelName { name: String, reason: &'static str },
    #[error("the demo model was not found; looked in {}", Listed(searched.iter().map(|p| p.display().to_string()).collect()))]
    DemoNotFound { searched: Vec<PathBuf> },
    #[error(
        "cannot get {model} from {endpoint}: {reason}. Without a network, download the model's folder \
         elsewhere and give --model PATH, or fill the cache at {cache} and set HF_HUB_OFFLINE=1"
    )]
    Hub { model: String, endpoint: String, cache: PathBuf, reason: String },
    #[error(
        "HF_HUB_OFFLINE is set and {model} is not complete in the cache at {cache}: {reason}. Fill the cache \
         on a machine with a network, or give --model PATH of a downloaded folder"
    )]
    NotInCache { model: String, cache: PathBuf, reason: String },

    #[error("cannot read {path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{path} is not valid: {source}")]
    Json { path: PathBuf, source: serde_json::Error },

    #[error("{path}: architecture {found} is not supported; expected {expected}")]
    UnsupportedArchitecture { path: PathBuf, found: String, expected: String },
    #[error("{path}: {key} = {found} is not supported: {why}")]
    UnsupportedConfig { path: PathBuf, key: &'static str, found: String, why: &'static str },
    #[error("{path}: {key} = {found}, expected {expected}")]
    InvalidConfig { path: PathBuf, key: &'static str, found: String, expected: String },

    #[error("no weights in {dir}: expected model.safetensors.index.json or model.safetensors, found {found}")]
    NoWeights { dir: PathBuf, found: Listed },
    #[error("{path}: {reason}")]
    BadIndex { path: PathBuf, reason: String },
    #[error("{index} names files that are not there (interrupted download?): {shards}")]
    MissingShards { index: PathBuf, shards: Listed },
    #[error("{index} and its files disagree: {tensors}")]
    MisplacedTensors { index: PathBuf, tensors: Listed },
    #[error("{path} is not a whole safetensors file ({size} bytes): {reason}")]
    BadShard { path: PathBuf, size: u64, reason: String },
    #[error("{dir}: {count} tensors that the model needs are missing: {tensors}")]
    MissingTensors { dir: PathBuf, count: usize, tensors: Listed },
    #[error("{dir}: tensors of the wrong shape: {tensors}")]
    WrongShape { dir: PathBuf, tensors: Listed },
    #[error("{dir}: tensors of an unsupported dtype (expected BF16, F16 or F32): {tensors}")]
    WrongDtype { dir: PathBuf, tensors: Listed },

    #[error("{path}: {reason}")]
    BadTokenizer { path: PathBuf, reason: String },
    #[error(
        "{path}: token id {max_id} has no embedding row; the model has {vocab_size} rows. Is this another model's tokenizer?"
    )]
    TokenizerTooLarge { path: PathBuf, max_id: u32, vocab_size: usize },
    #[error("cannot tokenize: {reason}")]
    Tokenize { reason: String },

    #[error("this model has no chat template (no chat_template.jinja, none in tokenizer_config.json)")]
    NoChatTemplate,
    #[error("{path}: the chat template does not compile: {reason}")]
    BadChatTemplate { path: PathBuf, reason: String },
    #[error("the chat template refused the conversation: {message}")]
    TemplateRaised { message: String },
    #[error("the chat template failed on this conversation: {reason}")]
    TemplateFailed { reason: String },
    #[error("chat_template_kwargs may not set {name}: the request has its own field for it")]
    ReservedTemplateVariable { name: String },
    #[error("a stop string is empty; it would match everywhere")]
    EmptyStopString,
}

impl ModelError {
    /// A stable name for metrics and for mapping to an HTTP status or an exit code.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Device(_) => "device",
            Self::Cuda(_) => "cuda",
            Self::DeviceDtype { .. } => "device_dtype",
            Self::PathNotFound { .. } => "path_not_found",
            Self::NotAFolder { .. } => "not_a_folder",
            Self::MissingFile { .. } => "missing_file",
            Self::BadModelName { .. } => "bad_model_name",
            Self::DemoNotFound { .. } => "demo_not_found",
            Self::Hub { .. } => "hub",
            Self::NotInCache { .. } => "not_in_cache",
            Self::Io { .. } => "io",
            Self::Json { .. } => "json",
            Self::UnsupportedArchitecture { .. } => "unsupported_architecture",
            Self::UnsupportedConfig { .. } => "unsupported_config",
            Self::InvalidConfig { .. } => "invalid_config",
            Self::NoWeights { .. } => "no_weights",
            Self::BadIndex { .. } => "bad_index",
            Self::MissingShards { .. } => "missing_shards",
            Self::MisplacedTensors { .. } => "misplaced_tensors",
            Self::BadShard { .. } => "bad_shard",
            Self::MissingTensors { .. } => "missing_tensors",
            Self::WrongShape { .. } => "wrong_shape",
            Self::WrongDtype { .. } => "wrong_dtype",
            Self::BadTokenizer { .. } => "bad_tokenizer",
            Self::TokenizerTooLarge { .. } => "tokenizer_too_large",
            Self::Tokenize { .. } => "tokenize",
            Self::NoChatTemplate => "no_chat_template",
            Self::BadChatTemplate { .. } => "bad_chat_template",
            Self::TemplateRaised { .. } => "template_raised",
            Self::TemplateFailed { .. } => "template_failed",
            Self::ReservedTemplateVariable { .. } => "reserved_template_variable",
            Self::EmptyStopString => "empty_stop_string",
        }
    }

    /// True when a request caused the error, so that the client gets a 400; false when the model's files did.
    pub fn is_client_error(&self) -> bool {
        matches!(
            self,
            Self::Tokenize { .. }
                | Self::NoChatTemplate
                | Self::TemplateRaised { .. }
                | Self::TemplateFailed { .. }
                | Self::ReservedTemplateVariable { .. }
                | Self::EmptyStopString
        )
    }
}

/// Something in a model's folder that is ignored, and that the operator should know of. Returned as data,
/// and logged once by [`crate::ModelFiles::load`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoadWarning {
    #[error("tensors that the model does not use are ignored: {0}")]
    UnknownTensors(Listed),
    #[error("files beside the index that it does not name are ignored: {0}")]
    StrayFiles(Listed),
    #[error(
        "tie_word_embeddings is true, so the embedding is the output head; the stored lm_head.weight differs and is ignored"
    )]
    HeadIgnored,
    #[error("config.json has no tie_word_embeddings; false is assumed, as transformers does for this class")]
    TieDefaulted,
    #[error("{file}: end-of-sequence ids outside the vocabulary of {vocab_size} are ignored: {ids:?}")]
    EosOutsideVocabulary { file: &'static str, ids: Vec<i64>, vocab_size: usize },
    #[error(
        "neither config.json nor generation_config.json names an end-of-sequence id; only max_tokens and stop end a request"
    )]
    NoEos,
}
