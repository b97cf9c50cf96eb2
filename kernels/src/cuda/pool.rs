//! The KV pool as kernels see it.

use bytemuck::{Pod, Zeroable};

use super::gpu::View;
use crate::layout::{Half, KvDtype, KvLayout};

/// A pool of bf16 blocks in device memory.
#[derive(Clone, Copy, Debug)]
pub struct PoolView<'a> {
    pub view: View<'a>,
    pub layout: KvLayout,
}

/// `struct Pool` of kernels/cu/common.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct RawPool {
    layer: u64,
    block: i64,
    block_size: i32,
    heads: i32,
}

impl PoolView<'_> {
    /// One layer of every block.
    pub(super) fn layer(&self, layer: usize) -> RawPool {
        assert!(
            self.layout.dtype == KvDtype::Bf16 && layer < self.layout.num_layers,
            "layer {layer} of {:?}. This is a bug.",
            self.layout
        );
        let bytes = KvDtype::Bf16.size();
        RawPool {
            layer: self.view.address() + self.layout.half(0, layer, Half::Key).start as u64,
            block: (self.layout.block_bytes() / bytes) as i64,
            block_size: self.layout.block_size as i32,
            heads: self.layout.num_kv_heads as i32,
        }
    }
}
