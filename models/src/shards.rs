//! Which safetensors files make up a checkpoint, and their mappings.
//!
//! Invariant: a tensor is taken from exactly the file that the index names for it. A file that the index
//! does not name is never opened, so a stray or consolidated copy cannot win over the indexed one.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Component, Path, PathBuf};

use memmap2::Mmap;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, Metadata};
use serde_json::Value;

use crate::error::{Listed, ModelError};
use crate::files::read_json;

pub(crate) const INDEX: &str = "model.safetensors.index.json";
pub(crate) const SINGLE: &str = "model.safetensors";

/// One mapped safetensors file.
#[derive(Debug)]
pub(crate) struct Shard {
    pub path: PathBuf,
    pub map: Mmap,
    /// Bytes before the first tensor: the length field and the header.
    pub data_start: usize,
    metadata: Metadata,
}

/// Where a tensor lies.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub shard: usize,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Within the file.
    pub bytes: std::ops::Range<usize>,
}

/// The files of one checkpoint and its tensors by name.
#[derive(Debug, Default)]
pub(crate) struct Checkpoint {
    pub shards: Vec<Shard>,
    pub entries: BTreeMap<String, Entry>,
    /// In a named file, but not listed by the index.
    pub unindexed: Vec<String>,
    /// Safetensors files that the index does not name.
    pub stray_files: Vec<String>,
}

impl Checkpoint {
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        let index = dir.join(INDEX);
        match read_json(&index)? {
            Some(value) => Self::open_sharded(dir, &index, &value),
            None if dir.join(SINGLE).is_file() => Self::open_single(dir),
            None => {
                let found = weight_files(dir)?;
                let found = if found.is_empty() { vec!["no weight file".to_owned()] } else { found };
                Err(ModelError::NoWeights { dir: dir.to_owned(), found: Listed(found) })
            }
        }
    }

    fn open_single(dir: &Path) -> Result<Self, ModelError> {
        let shard = Shard::open(&dir.join(SINGLE))?;
        let entries = shard.entries(0).collect();
        Ok(Self { shards: vec![shard], entries, ..Self::default() })
    }

    fn open_sharded(dir: &Path, index: &Path, value: &Value) -> Result<Self, ModelError> {
        let files = parse_index(index, value)?;
        let missing: Vec<String> = files.keys().filter(|file| !dir.join(file).is_file()).cloned().collect();
        if !missing.is_empty() {
            return Err(ModelError::MissingShards { index: index.to_owned(), shards: Listed(missing) });
        }
        let mut checkpoint = Self::default();
        let mut misplaced = Vec::new();
        for (file, tensors) in &files {
            let shard = Shard::open(&dir.join(file))?;
            let mut present: BTreeMap<String, Entry> = shard.entries(checkpoint.shards.len()).collect();
            for name in tensors {
                match present.remove(name) {
                    Some(entry) => drop(checkpoint.entries.insert(name.clone(), entry)),
                    None => misplaced.push(format!("{name} is not in {file}, which the index names for it")),
                }
            }
            checkpoint.unindexed.extend(present.into_keys().map(|name| format!("{name} in {file}")));
            checkpoint.shards.push(shard);
        }
        if !misplaced.is_empty() {
            return Err(ModelError::MisplacedTensors { index: index.to_owned(), tensors: Listed(misplaced) });
        }
        let on_disk = weight_files(dir)?.into_iter();
        checkpoint.stray_files =
            on_disk.filter(|file| file.ends_with(".safetensors") && !files.contains_key(file)).collect();
        Ok(checkpoint)
    }
}

impl Shard {
    fn open(path: &Path) -> Result<Self, ModelError> {
        let io = |source| ModelError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        let bad = |reason: String| ModelError::BadShard { path: path.to_owned(), size, reason };
        if size == 0 {
            return Err(bad("it is empty".into()));
        }
        // SAFETY: the mapping is read-only and private to this process, and lives as long as `Shard`. It is
        // sound as long as nobody shortens or rewrites the file meanwhile, which is what every mmap loader of
        // weights asks of its operator (a download replaces files by rename, which leaves this inode whole).
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let (header, metadata) = SafeTensors::read_metadata(&map).map_err(|error| bad(error.to_string()))?;
        // The eight bytes before the header hold its length.
        Ok(Self { path: path.to_owned(), map, data_start: 8 + header, metadata })
    }

    fn entries(&self, shard: usize) -> impl Iterator<Item = (String, Entry)> {
        self.metadata.tensors().into_iter().map(move |(name, info)| {
            let (start, end) = info.data_offsets;
            let bytes = self.data_start + start..self.data_start + end;
            (name, Entry { shard, dtype: info.dtype, shape: info.shape.clone(), bytes })
        })
    }
}

/// File name -> the tensors that the index places in it.
pub(crate) fn parse_index(path: &Path, index: &Value) -> Result<BTreeMap<String, Vec<String>>, ModelError> {
    let bad = |reason: String| ModelError::BadIndex { path: path.to_owned(), reason };
    let map = index.get("weight_map").ok_or_else(|| bad("it has no weight_map".into()))?;
    let map = map.as_object().ok_or_else(|| bad("weight_map is not an object".into()))?;
    if map.is_empty() {
        return Err(bad("weight_map is empty".into()));
    }
    let mut files: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor, file) in map {
        let file =
            file.as_str().ok_or_else(|| bad(format!("the file of {tensor} is not a string: {file}")))?;
        if !is_plain_name(file) {
            return Err(bad(format!(
                "the file of {tensor}, {file:?}, is not a plain file name in this folder"
            )));
        }
        files.entry(file.to_owned()).or_default().push(tensor.clone());
    }
    Ok(files)
}

fn is_plain_name(file: &str) -> bool {
    let mut parts = Path::new(file).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(name)), None) if name == file)
}

/// Names of files in `dir` that look like weights of any format, sorted, to say what was found instead.
fn weight_files(dir: &Path) -> Result<Vec<String>, ModelError> {
    let io = |source| ModelError::Io { path: dir.to_owned(), source };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(io)? {
        let name = entry.map_err(io)?.file_name().to_string_lossy().into_owned();
        if [".safetensors", ".bin", ".gguf", ".pt", ".pth"].iter().any(|end| name.ends_with(end)) {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}
