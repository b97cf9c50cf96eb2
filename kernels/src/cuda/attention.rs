//! Paged attention: sequences of one new row go to the decode kernels, others to the prefill kernels.

use bytemuck::{Pod, Zeroable};
use half::bf16;

use super::backend::{Dims, Launch};
use super::error::CudaError;
use super::gpu::{Gpu, View};
use super::pool::{PoolView, RawPool};

type Result<T> = std::result::Result<T, CudaError>;

/// Tokens that one block of the decode kernel reads: `decode::SPLIT`.
pub const SPLIT: usize = 128;

/// Lanes (rows x heads of a group) of a tile of the prefill kernel: `prefill::LANES`.
pub const TILE_LANES: usize = 64;

/// What both kinds read and write: bf16 `q` and `out`, `[rows, heads * dim]`, and i32 block tables.
#[derive(Clone, Copy, Debug)]
pub struct Queries<'a> {
    pub q: View<'a>,
    pub out: View<'a>,
    /// Query heads.
    pub heads: usize,
    /// i32 block ids, all sequences' tables; they must be in the pool.
    pub tables: View<'a>,
}

/// Sequences of one new row each. i32 views of one element a sequence; contexts of 0 are padding.
#[derive(Clone, Copy, Debug)]
pub struct Decode<'a> {
    pub count: usize,
    /// Each sequence's row of `q`.
    pub rows: View<'a>,
    /// Tokens that it sees, itself included.
    pub contexts: View<'a>,
    /// Where its block table starts.
    pub table_starts: View<'a>,
    /// Where its splits' results go: the sum of [`splits`] of the sequences before it.
    pub split_starts: View<'a>,
    /// At least the longest context.
    pub max_context: usize,
    /// Room of [`scratch_floats`] f32 values.
    pub scratch: View<'a>,
    /// Splits that there is room for: at least the sum of all sequences'.
    pub capacity: usize,
}

/// Sequences of several new rows. i32 views.
#[derive(Clone, Copy, Debug)]
pub struct Prefill<'a> {
    /// `[tiles, 2]`: sequence and first lane, see [`tiles`].
    pub tiles: View<'a>,
    pub num_tiles: usize,
    /// One element a sequence: first row of `q`, rows, tokens that its last row sees, where its block table starts.
    pub starts: View<'a>,
    pub lengths: View<'a>,
    pub contexts: View<'a>,
    pub table_starts: View<'a>,
    pub sequences: usize,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct RawDecode {
    q: u64,
    out: u64,
    pool: RawPool,
    rows: u64,
    contexts: u64,
    table_starts: u64,
    tables: u64,
    split_starts: u64,
    stats: u64,
    partials: u64,
    heads: i32,
    scale: f32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct RawPrefill {
    q: u64,
    out: u64,
    pool: RawPool,
    tiles: u64,
    starts: u64,
    lengths: u64,
    contexts: u64,
    table_starts: u64,
    tables: u64,
    heads: i32,
    scale: f32,
}

/// Errors where there is no kernel for heads of that size.
pub fn check_heads(heads: usize, kv_heads: usize, head_dim: usize) -> Result<()> {
    if ![32, 64, 128].contains(&head_dim) {
        return Err(CudaError::Unsupported { what: "head_dim", value: head_dim, expected: "32, 64 or 128" });
    }
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) || heads / kv_heads > TILE_LANES {
        let expected = "a multiple of the KV heads, at most 64 times as many";
        return Err(CudaError::Unsupported { what: "num_attention_heads", value: heads, expected });
    }
    Ok(())
}

/// Query heads that the decode kernel takes together, for a group of `group` heads that share a KV head.
fn together(group: usize, dim: usize) -> usize {
    let most = if dim == 32 { 4 } else { 8 };
    group.next_power_of_two().min(most)
}

/// Scores are scaled by 1 / sqrt(dim), and exponentials taken to the base of 2.
fn scale(dim: usize) -> f32 {
    std::f32::consts::LOG2_E / (dim as f32).sqrt()
}

/// Splits of a context.
pub fn splits(context: usize) -> usize {
    context.div_ceil(SPLIT)
}

/// f32 values of scratch for so many splits.
pub fn scratch_floats(splits: usize, heads: usize, head_dim: usize) -> usize {
    splits * heads * (head_dim + 2)
}

impl Decode<'_> {
    /// Attention of each sequence's row.
    pub fn run(&self, gpu: &Gpu, queries: &Queries<'_>, pool: &PoolView<'_>, layer: usize) -> Result<()> {
        let (heads, kv_heads, dim) = (queries.heads, pool.layout.num_kv_heads, pool.layout.head_dim);
        check_heads(heads, kv_heads, dim)?;
        let (group, splits) = (heads / kv_heads, splits(self.max_context));
        let (together, ids) =
            (together(group, dim), |view: View<'_>| view.elements::<i32>(self.count, "sequences"));
        let floats = scratch_floats(self.capacity, heads, dim);
        let scratch = self.scratch.elements::<f32>(floats, "attention's scratch");
        let arguments = RawDecode {
            q: queries.q.elements::<bf16>(heads * dim, "queries"),
            out: queries.out.elements::<bf16>(heads * dim, "attention's output"),
            pool: pool.layer(layer),
            rows: ids(self.rows),
            contexts: ids(self.contexts),
            table_starts: ids(self.table_starts),
            tables: queries.tables.elements::<i32>(0, "block tables"),
            split_starts: ids(self.split_starts),
            stats: scratch,
            partials: scratch + (2 * self.capacity * heads * size_of::<f32>()) as u64,
            heads: heads as i32,
            scale: scale(dim),
        };
        let parts = (kv_heads * group.div_ceil(together)) as u32;
        let dims = Dims {
            grid: (splits as u32, parts, self.count as u32),
            threads: 128,
            shared: 4 * together * (dim + 2) * size_of::<f32>(),
        };
        let kernel = format!("decode_attention_{dim}_{together}");
        let launch = Launch { kernel: &kernel, dims, arguments: &[bytemuck::bytes_of(&arguments)] };
        // SAFETY: the views were checked; rows, tables and contexts are the caller's promise.
        unsafe { gpu.launch(&launch)? };
        if splits > 1 {
            let dims = Dims { grid: (heads as u32, self.count as u32, 1), threads: dim as u32, shared: 0 };
            let launch =
                Launch { kernel: "combine_splits", dims, arguments: &[bytemuck::bytes_of(&arguments)] };
            // SAFETY: as above.
            unsafe { gpu.launch(&launch)? };
        }
        Ok(())
    }
}

/// The tiles of sequences with `lengths` new rows each: (sequence, first lane). The last of a sequence come first: they have
/// the most keys, and what takes longest should start first.
pub fn tiles(lengths: &[usize], group: usize) -> Vec<[i32; 2]> {
    let of = |(seq, length): (usize, &usize)| {
        (0..(length * group).div_ceil(TILE_LANES))
            .rev()
            .map(move |tile| [seq as i32, (tile * TILE_LANES) as i32])
    };
    lengths.iter().enumerate().flat_map(of).collect()
}

impl Prefill<'_> {
    /// Causal attention of every row of the sequences.
    pub fn run(&self, gpu: &Gpu, queries: &Queries<'_>, pool: &PoolView<'_>, layer: usize) -> Result<()> {
        let (heads, kv_heads, dim) = (queries.heads, pool.layout.num_kv_heads, pool.layout.head_dim);
        check_heads(heads, kv_heads, dim)?;
        let ids = |view: View<'_>| view.elements::<i32>(self.sequences, "sequences");
        let arguments = RawPrefill {
            q: queries.q.elements::<bf16>(heads * dim, "queries"),
            out: queries.out.elements::<bf16>(heads * dim, "attention's output"),
            pool: pool.layer(layer),
            tiles: self.tiles.elements::<i32>(2 * self.num_tiles, "tiles"),
            starts: ids(self.starts),
            lengths: ids(self.lengths),
            contexts: ids(self.contexts),
            table_starts: ids(self.table_starts),
            tables: queries.tables.elements::<i32>(0, "block tables"),
            heads: heads as i32,
            scale: scale(dim),
        };
        // Two stages of 64 keys and 64 values.
        let shared = 2 * 2 * 64 * dim * size_of::<bf16>();
        let dims = Dims { grid: (self.num_tiles as u32, kv_heads as u32, 1), threads: 128, shared };
        let kernel = format!("prefill_attention_{dim}");
        let launch = Launch { kernel: &kernel, dims, arguments: &[bytemuck::bytes_of(&arguments)] };
        // SAFETY: the views were checked; tiles, rows, tables and contexts are the caller's promise.
        unsafe { gpu.launch(&launch) }
    }
}
