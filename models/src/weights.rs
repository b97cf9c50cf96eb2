//! The weights of a checkpoint: each file mapped once, tensors by name as views into the mappings.

use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::tensor::Dtype;

use crate::config::ModelConfig;
use crate::error::{Listed, LoadWarning, ModelError};
use crate::shards::{Checkpoint, Entry};
use crate::tensors::required_tensors;

/// The number formats that weights may have. A checkpoint may mix them (norms in f32, the rest in bf16).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightDtype {
    BF16,
    F16,
    F32,
}

impl WeightDtype {
    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            Self::BF16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    fn from_safetensors(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::BF16 => Some(Self::BF16),
            Dtype::F16 => Some(Self::F16),
            Dtype::F32 => Some(Self::F32),
            _ => None,
        }
    }
}

/// One tensor, row-major and little-endian, in the mapped file. The bytes may be unaligned for `dtype`.
#[derive(Debug, Clone, Copy)]
pub struct WeightView<'a> {
    pub dtype: WeightDtype,
    pub shape: &'a [usize],
    pub bytes: &'a [u8],
}

impl WeightView<'_> {
    /// All elements as f32; exact from each format.
    pub fn to_f32(&self) -> Vec<f32> {
        match self.dtype {
            WeightDtype::F32 => words(self.bytes).collect(),
            WeightDtype::F16 => halves(self.bytes).map(|bits| f16::from_bits(bits).to_f32()).collect(),
            WeightDtype::BF16 => halves(self.bytes).map(|bits| bf16::from_bits(bits).to_f32()).collect(),
        }
    }

    /// All elements as bf16, rounded to nearest, ties to even. f16 and f32 lose mantissa bits; no finite
    /// f16 overflows.
    pub fn to_bf16(&self) -> Vec<bf16> {
        match self.dtype {
            WeightDtype::BF16 => halves(self.bytes).map(bf16::from_bits).collect(),
            WeightDtype::F16 => {
                halves(self.bytes).map(|bits| bf16::from_f32(f16::from_bits(bits).to_f32())).collect()
            }
            WeightDtype::F32 => words(self.bytes).map(bf16::from_f32).collect(),
        }
    }
}

fn halves(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes.as_chunks::<2>().0.iter().map(|half| u16::from_le_bytes(*half))
}

fn words(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word))
}

/// A checkpoint's files, open. Views borrow from it; dropping it unmaps the files.
#[derive(Debug)]
pub struct Weights {
    dir: PathBuf,
    checkpoint: Checkpoint,
}

impl Weights {
    /// Maps `dir/model.safetensors`, or the files that `dir/model.safetensors.index.json` names. With an
    /// index, nothing else in the folder is opened. Reads headers only.
    ///
    /// # Errors
    /// No weights; an index that is broken, points out of the folder or at absent files, or disagrees with
    /// them; a file that is truncated.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        Ok(Self { dir: dir.to_owned(), checkpoint: Checkpoint::open(dir)? })
    }

    /// Checks that every tensor that `config` needs is there, with its shape and a usable dtype, and returns
    /// what is there besides.
    ///
    /// # Errors
    /// All missing tensors together; else all of a wrong shape; else all of a wrong dtype.
    pub fn check(&self, config: &ModelConfig) -> Result<Vec<LoadWarning>, ModelError> {
        let required = required_tensors(config);
        let (mut missing, mut shapes, mut dtypes) = (Vec::new(), Vec::new(), Vec::new());
        for spec in &required {
            let Some(entry) = self.entry(&spec.name) else {
                missing.push(spec.name.clone());
                continue;
            };
            if entry.shape != spec.shape {
                shapes.push(wrong_shape(&spec.name, &spec.shape, &entry.shape));
            }
            if WeightDtype::from_safetensors(entry.dtype).is_none() {
                dtypes.push(format!("{} is {:?}", spec.name, entry.dtype));
            }
        }
        let dir = self.dir.clone();
        if !missing.is_empty() {
            return Err(ModelError::MissingTensors { dir, count: missing.len(), tensors: Listed(missing) });
        }
        if !shapes.is_empty() {
            return Err(ModelError::WrongShape { dir, tensors: Listed(shapes) });
        }
        if !dtypes.is_empty() {
            return Err(ModelError::WrongDtype { dir, tensors: Listed(dtypes) });
        }
        Ok(self.leftovers(config, &required.into_iter().map(|spec| spec.name).collect()))
    }

    /// The tensor `name`, of whatever shape.
    ///
    /// # Errors
    /// It is absent, or of a dtype that weights may not have.
    pub fn view(&self, name: &str) -> Result<WeightView<'_>, ModelError> {
        let entry = self.entry(name).ok_or_else(|| ModelError::MissingTensors {
            dir: self.dir.clone(),
            count: 1,
            tensors: Listed(vec![name.to_owned()]),
        })?;
        let dtype = WeightDtype::from_safetensors(entry.dtype).ok_or_else(|| ModelError::WrongDtype {
            dir: self.dir.clone(),
            tensors: Listed(vec![format!("{name} is {:?}", entry.dtype)]),
        })?;
        Ok(WeightView { dtype, shape: &entry.shape, bytes: self.bytes(entry) })
    }

    /// The tensor `name`, which must have this shape.
    ///
    /// # Errors
    /// As [`Self::view`], and when the shape differs.
    pub fn expect(&self, name: &str, shape: &[usize]) -> Result<WeightView<'_>, ModelError> {
        let view = self.view(name)?;
        if view.shape != shape {
            let tensors = Listed(vec![wrong_shape(name, shape, view.shape)]);
            return Err(ModelError::WrongShape { dir: self.dir.clone(), tensors });
        }
        Ok(view)
    }

    /// [`Self::view`], as f32.
    pub fn tensor_f32(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        Ok(self.view(name)?.to_f32())
    }

    /// [`Self::view`], as bf16 (see [`WeightView::to_bf16`]).
    pub fn tensor_bf16(&self, name: &str) -> Result<Vec<bf16>, ModelError> {
        Ok(self.view(name)?.to_bf16())
    }

    /// True when the checkpoint has a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.entry(name).is_some()
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.checkpoint.entries.keys().map(String::as_str)
    }

    /// The files in use.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.checkpoint.shards.iter().map(|shard| shard.path.as_path())
    }

    /// Size of the files in use, in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.checkpoint.shards.iter().map(|shard| shard.map.len() as u64).sum()
    }

    fn entry(&self, name: &str) -> Option<&Entry> {
        self.checkpoint.entries.get(name)
    }

    fn bytes(&self, entry: &Entry) -> &[u8] {
        &self.checkpoint.shards[entry.shard].map[entry.bytes.clone()]
    }

    fn leftovers(&self, config: &ModelConfig, used: &std::collections::BTreeSet<String>) -> Vec<LoadWarning> {
        let mut warnings = Vec::new();
        let mut unknown = self.checkpoint.unindexed.clone();
        unknown.extend(self.names().filter(|name| !used.contains(*name)).map(str::to_owned));
        if config.tie_word_embeddings {
            unknown.retain(|name| name != "lm_head.weight");
            if self.stored_head_differs() {
                warnings.push(LoadWarning::HeadIgnored);
            }
        }
        if !unknown.is_empty() {
            warnings.push(LoadWarning::UnknownTensors(Listed(unknown)));
        }
        if !self.checkpoint.stray_files.is_empty() {
            warnings.push(LoadWarning::StrayFiles(Listed(self.checkpoint.stray_files.clone())));
        }
        warnings
    }

    /// Checkpoints with tied embeddings often store the head all the same, as a copy.
    fn stored_head_differs(&self) -> bool {
        let (Some(head), Some(embedding)) =
            (self.entry("lm_head.weight"), self.entry("model.embed_tokens.weight"))
        else {
            return false;
        };
        head.dtype != embedding.dtype || self.bytes(head) != self.bytes(embedding)
    }
}

fn wrong_shape(name: &str, expected: &[usize], found: &[usize]) -> String {
    format!("{name} is {found:?}, expected {expected:?}")
}
