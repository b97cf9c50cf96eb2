//! Whole blocks of the pool: writing tokens, copying, gathering and scattering.

use half::bf16;

use super::backend::{Dims, Launch};
use super::error::CudaError;
use super::gpu::{Gpu, View};
use super::pool::PoolView;

type Result<T> = std::result::Result<T, CudaError>;

/// Blocks of the grid that share one copy: 32 x 256 threads x 16 bytes are 128 KiB at a time.
const SHARERS: u32 = 32;

/// Writes bf16 keys and values `[rows, kv_heads, dim]` of one layer to slots (i64; negative: padding). Slots must be in
/// the pool.
pub fn reshape_and_cache(
    gpu: &Gpu,
    (keys, values): (View<'_>, View<'_>),
    slots: View<'_>,
    pool: &PoolView<'_>,
    layer: usize,
    rows: usize,
) -> Result<()> {
    let row = pool.layout.row();
    assert!(row.is_multiple_of(8), "rows of {row}. This is a bug.");
    let (keys, values) =
        (keys.elements::<bf16>(rows * row, "keys"), values.elements::<bf16>(rows * row, "values"));
    let slots = slots.elements::<i64>(rows, "slots");
    let dims = Dims { grid: (rows as u32, 1, 1), threads: 128, shared: 0 };
    let (layer, row) = (pool.layer(layer), row as i32);
    let arguments: [&[u8]; 5] = [
        bytemuck::bytes_of(&keys),
        bytemuck::bytes_of(&values),
        bytemuck::bytes_of(&slots),
        bytemuck::bytes_of(&layer),
        bytemuck::bytes_of(&row),
    ];
    // SAFETY: the views were checked; that the slots are in the pool is the caller's promise.
    unsafe { gpu.launch(&Launch { kernel: "reshape_and_cache", dims, arguments: &arguments }) }
}

/// Blocks of one side of a copy.
#[derive(Clone, Copy, Debug)]
pub struct Side<'a> {
    pub blocks: View<'a>,
    /// i32 block ids, or none to count up from 0.
    pub ids: Option<View<'a>>,
}

/// Copies `count` blocks of `bytes` (a multiple of 16): within the pool, from it (gather) or into it (scatter). Ids must
/// be inside; no block may be both read and written.
pub fn copy_blocks(gpu: &Gpu, to: Side<'_>, from: Side<'_>, count: usize, bytes: usize) -> Result<()> {
    assert!(bytes.is_multiple_of(16), "blocks of {bytes} bytes. This is a bug.");
    let address = |side: &Side<'_>| {
        let needed = if side.ids.is_some() { bytes } else { count * bytes };
        side.blocks.elements::<u8>(needed, "blocks")
    };
    let ids = |side: &Side<'_>| side.ids.map_or(0, |ids| ids.elements::<i32>(count, "block ids"));
    let (to_blocks, to_ids, from_blocks, from_ids) = (address(&to), ids(&to), address(&from), ids(&from));
    let dims = Dims { grid: (SHARERS, count as u32, 1), threads: 256, shared: 0 };
    let bytes = bytes as i64;
    let arguments: [&[u8]; 5] = [
        bytemuck::bytes_of(&to_blocks),
        bytemuck::bytes_of(&to_ids),
        bytemuck::bytes_of(&from_blocks),
        bytemuck::bytes_of(&from_ids),
        bytemuck::bytes_of(&bytes),
    ];
    // SAFETY: the views were checked; that the ids are inside is the caller's promise.
    unsafe { gpu.launch(&Launch { kernel: "copy_blocks", dims, arguments: &arguments }) }
}
