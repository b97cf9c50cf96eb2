//! Chat templates: a conversation to the text that the model was trained on.
//!
//! The template is rendered as transformers renders it: the same Jinja options, the same functions, and
//! `tojson` in Python's format. The template comes with the model and is trusted; the conversation is not,
//! so whatever it makes the template do is a typed error.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::SystemTime;

use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, Output, State, UndefinedBehavior, Value};
use serde_json::{Map, Value as Json};

use crate::error::ModelError;
use crate::files::read;
use crate::python_json;
use crate::strftime::strftime;
use crate::tokenizer::TokenizerConfig;

const FILE: &str = "chat_template.jinja";
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// A model's chat template, compiled.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: BTreeMap<&'static str, String>,
}

/// One conversation to render.
#[derive(Debug, Clone, Copy)]
pub struct ChatInput<'a> {
    /// Objects with `role`, `content` (a string) and whatever else the template knows.
    pub messages: &'a [Json],
    /// Tool definitions, or empty.
    pub tools: &'a [Json],
    /// Whether to end with the start of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables, such as `enable_thinking`.
    pub kwargs: Option<&'a Map<String, Json>>,
    /// For templates that print the date (UTC).
    pub now: SystemTime,
}

impl ChatTemplate {
    /// Compiles `dir/chat_template.jinja`, else the template in `tokenizer_config.json`; `None` when the
    /// model has neither.
    ///
    /// # Errors
    /// The template does not compile, or has a form that is not known.
    pub fn load(dir: &Path, config: &TokenizerConfig) -> Result<Option<Self>, ModelError> {
        let path = dir.join(FILE);
        if let Some(bytes) = read(&path)? {
            let source = String::from_utf8(bytes).map_err(|error| ModelError::BadChatTemplate {
                path: path.clone(),
                reason: error.to_string(),
            })?;
            return Self::compile(&path, vec![(DEFAULT.to_owned(), source)], config).map(Some);
        }
        let path = dir.join("tokenizer_config.json");
        let sources = match &config.chat_template {
            None => return Ok(None),
            Some(Json::String(source)) => vec![(DEFAULT.to_owned(), source.clone())],
            Some(named) => named_templates(named).ok_or_else(|| ModelError::BadChatTemplate {
                path: path.clone(),
                reason: "chat_template is neither a string nor a list of {name, template} with a default"
                    .into(),
            })?,
        };
        Self::compile(&path, sources, config).map(Some)
    }

    /// Renders the prompt. With several templates, `tool_use` is taken when there are tools.
    ///
    /// # Errors
    /// [`ModelError::TemplateRaised`] when the template refuses the conversation,
    /// [`ModelError::TemplateFailed`] when it stumbles over it, and
    /// [`ModelError::ReservedTemplateVariable`] when `kwargs` would replace part of the request.
    pub fn render(&self, input: ChatInput<'_>) -> Result<String, ModelError> {
        let tool_use = if input.tools.is_empty() {
            Err(())
        } else {
            self.environment.get_template(TOOL_USE).map_err(drop)
        };
        let template = match tool_use {
            Ok(template) => template,
            Err(()) => self.environment.get_template(DEFAULT).map_err(|error| failure(&error))?,
        };
        template.render(self.context(input)?).map_err(|error| failure(&error))
    }

    fn context(&self, input: ChatInput<'_>) -> Result<BTreeMap<String, Value>, ModelError> {
        let tools = if input.tools.is_empty() { Value::from(()) } else { Value::from_serialize(input.tools) };
        let now = input.now;
        let clock = move |format: String| {
            strftime(now, &format).map_err(|reason| Error::new(ErrorKind::InvalidOperation, reason))
        };
        let mut context = BTreeMap::from([
            ("messages".to_owned(), Value::from_serialize(input.messages)),
            ("tools".to_owned(), tools),
            ("documents".to_owned(), Value::from(())),
            ("add_generation_prompt".to_owned(), Value::from(input.add_generation_prompt)),
            ("strftime_now".to_owned(), Value::from_function(clock)),
        ]);
        for (name, token) in &self.special_tokens {
            context.insert((*name).to_owned(), Value::from(token.as_str()));
        }
        for (name, value) in input.kwargs.into_iter().flatten() {
            if context.contains_key(name) && name != "documents" {
                return Err(ModelError::ReservedTemplateVariable { name: name.clone() });
            }
            context.insert(name.clone(), Value::from_serialize(value));
        }
        Ok(context)
    }

    fn compile(
        path: &Path,
        sources: Vec<(String, String)>,
        config: &TokenizerConfig,
    ) -> Result<Self, ModelError> {
        let mut environment = environment();
        for (name, source) in sources {
            environment.add_template_owned(name, source).map_err(|error| ModelError::BadChatTemplate {
                path: path.to_owned(),
                reason: describe(&error),
            })?;
        }
        let tokens = [
            ("bos_token", &config.bos_token),
            ("eos_token", &config.eos_token),
            ("pad_token", &config.pad_token),
        ];
        let special_tokens =
            tokens.into_iter().filter_map(|(name, token)| Some((name, token.clone()?))).collect();
        Ok(Self { environment, special_tokens })
    }
}

/// Jinja as transformers sets it up (`utils/chat_template_utils.py`).
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(format_like_python);
    environment.add_filter("tojson", python_json::tojson);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
    environment
}

/// Constants print as in Python, where they are capitalised.
fn format_like_python(out: &mut Output<'_>, state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    let text = match value.kind() {
        ValueKind::None => "None",
        ValueKind::Bool if value.is_true() => "True",
        ValueKind::Bool => "False",
        _ => return minijinja::escape_formatter(out, state, value),
    };
    out.write_str(text).map_err(Error::from)
}

/// `[{"name": …, "template": …}, …]`; one of them must be the default.
fn named_templates(value: &Json) -> Option<Vec<(String, String)>> {
    let field = |item: &Json, key| Some(item.get(key)?.as_str()?.to_owned());
    let named: Option<Vec<_>> =
        value.as_array()?.iter().map(|item| Some((field(item, "name")?, field(item, "template")?))).collect();
    named.filter(|templates| templates.iter().any(|(name, _)| name == DEFAULT))
}

/// What `raise_exception` was called with; found again at the bottom of minijinja's error.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn failure(error: &Error) -> ModelError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(Raised(message)) = error.downcast_ref() {
            return ModelError::TemplateRaised { message: message.clone() };
        }
        cause = error.source();
    }
    ModelError::TemplateFailed { reason: describe(error) }
}

/// The error's kind, detail and line, without the template's source that `{:#}` would add.
fn describe(error: &Error) -> String {
    let detail = error.detail().unwrap_or("no detail");
    match error.line() {
        Some(line) => format!("{}: {detail} (line {line})", error.kind()),
        None => format!("{}: {detail}", error.kind()),
    }
}
