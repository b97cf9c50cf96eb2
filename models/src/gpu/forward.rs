//! The launches of one step. Everything that differs between steps of one shape is in device memory.

use kernels::cuda::attention::{Decode, Prefill, Queries};
use kernels::cuda::linear::{FEW_ROWS, Into, NORM_ROWS, Rows, Shape as Product, multiply};
use kernels::cuda::pointwise::{RmsNorm, add_bias, embedding, silu_mul};
use kernels::cuda::qkv::SplitQkv;
use kernels::cuda::sample::Sample;
use kernels::cuda::{Buffer, CudaError, Gpu, PoolView, View};

use super::Sizes;
use super::inputs::{InputViews, Shape};
use super::weights::{GpuLayer, GpuWeights};
use super::workspace::Workspace;

type Result<T> = std::result::Result<T, CudaError>;

/// What a step's launches need.
pub(super) struct Forward<'a> {
    pub gpu: &'a Gpu,
    pub sizes: Sizes,
    pub eps: f32,
    pub weights: &'a GpuWeights,
    pub work: &'a Workspace,
    pub inputs: InputViews<'a>,
    pub shape: Shape,
    pub pool: PoolView<'a>,
    /// One byte an id of the vocabulary.
    pub valid: &'a Buffer,
}

impl Forward<'_> {
    /// Everything from token ids to sampled ids. `launched(n)` is called when layers `..n` are launched.
    pub fn launch(&self, mut launched: impl FnMut(usize) -> Result<()>) -> Result<()> {
        let (rows, work) = (self.shape.rows, self.work);
        let table = self.weights.embed.view();
        embedding(self.gpu, table, self.inputs.tokens, work.x.view(), (rows, self.sizes.hidden))?;
        for (index, layer) in self.weights.layers.iter().enumerate() {
            self.attention(layer, index)?;
            // The layer's K and V are written before its MLP, but a mark between them would cost more than it gains.
            self.mlp(layer)?;
            launched(index + 1)?;
        }
        if self.shape.samples > 0 { self.sample() } else { Ok(()) }
    }

    /// The residual stream normalised and multiplied: in one kernel where there are few rows.
    fn normed(&self, norm: &Buffer, w: &Buffer, y: Into<'_>, n: usize) -> Result<()> {
        let (rows, width, x) = (self.shape.rows, self.sizes.hidden, self.work.x.view());
        let product = Product { m: rows, n, k: width };
        if rows <= NORM_ROWS {
            return multiply(
                self.gpu,
                Rows::Normed { x, norm: norm.view(), eps: self.eps },
                w.view(),
                y,
                product,
            );
        }
        let y_of_norm = self.work.hidden.view();
        let all =
            RmsNorm { x, weight: norm.view(), rows: None, y: y_of_norm, count: rows, width, eps: self.eps };
        all.run(self.gpu)?;
        multiply(self.gpu, Rows::Bf16(y_of_norm), w.view(), y, product)
    }

    /// `x += from · wᵀ + bias`.
    fn add(&self, from: View<'_>, w: &Buffer, bias: Option<&Buffer>, k: usize) -> Result<()> {
        let (rows, n, x) = (self.shape.rows, self.sizes.hidden, self.work.x.view());
        multiply(self.gpu, Rows::Bf16(from), w.view(), Into::Residual(x), Product { m: rows, n, k })?;
        bias.map_or(Ok(()), |bias| add_bias(self.gpu, x, bias.view(), rows, n))
    }

    fn attention(&self, layer: &GpuLayer, index: usize) -> Result<()> {
        let (work, inputs, shape) = (self.work, &self.inputs, &self.shape);
        self.normed(&layer.input_norm, &layer.qkv, Into::Bf16(work.qkv.view()), self.sizes.qkv())?;
        let split = SplitQkv {
            qkv: work.qkv.view(),
            bias: layer.qkv_bias.as_ref().map(Buffer::view),
            norms: layer.qk_norm.as_ref().map(|(q, k)| (q.view(), k.view())),
            eps: self.eps,
            cos: self.weights.cos.view(),
            sin: self.weights.sin.view(),
            positions: inputs.positions,
            slots: inputs.slots,
            q: work.q.view(),
            rows: shape.rows,
            heads: self.sizes.heads,
        };
        split.run(self.gpu, &self.pool, index)?;
        let (q, out) = (work.q.view(), work.attention.view());
        let queries = Queries { q, out, heads: self.sizes.heads, tables: inputs.tables };
        if shape.decode > 0 {
            let [rows, contexts, table_starts, split_starts] = inputs.decode;
            let decode = Decode {
                count: shape.decode,
                rows,
                contexts,
                table_starts,
                split_starts,
                max_context: shape.max_context,
                scratch: work.splits.view(),
                capacity: work.capacity.splits,
            };
            decode.run(self.gpu, &queries, &self.pool, index)?;
        }
        if shape.prefill > 0 {
            let [starts, lengths, contexts, table_starts] = inputs.prefill;
            let (tiles, num_tiles, sequences) = (inputs.tiles, shape.tiles, shape.prefill);
            let prefill = Prefill { tiles, num_tiles, starts, lengths, contexts, table_starts, sequences };
            prefill.run(self.gpu, &queries, &self.pool, index)?;
        }
        self.add(out, &layer.out, layer.out_bias.as_ref(), self.sizes.q())
    }

    fn mlp(&self, layer: &GpuLayer) -> Result<()> {
        let (work, rows, mlp) = (self.work, self.shape.rows, self.sizes.mlp);
        if rows <= FEW_ROWS {
            self.normed(&layer.post_norm, &layer.gate_up, Into::SiluMul(work.product.view()), mlp)?;
        } else {
            self.normed(&layer.post_norm, &layer.gate_up, Into::Bf16(work.gate_up.view()), 2 * mlp)?;
            silu_mul(self.gpu, work.gate_up.view(), work.product.view(), rows, mlp)?;
        }
        self.add(work.product.view(), &layer.down, None, mlp)
    }

    /// Logits of the rows that are sampled, and their tokens.
    fn sample(&self) -> Result<()> {
        let (work, sizes, count) = (self.work, &self.sizes, self.shape.samples);
        let norm = RmsNorm {
            x: work.x.view(),
            weight: self.weights.norm.view(),
            rows: Some(self.inputs.samples),
            y: work.last.view(),
            count,
            width: sizes.hidden,
            eps: self.eps,
        };
        norm.run(self.gpu)?;
        let head = self.weights.lm_head.as_ref().unwrap_or(&self.weights.embed).view();
        let product = Product { m: count, n: sizes.vocab, k: sizes.hidden };
        multiply(self.gpu, Rows::Bf16(work.last.view()), head, Into::F32(work.logits.view()), product)?;
        let sample = Sample {
            logits: work.logits.view(),
            valid: self.valid.view(),
            params: self.inputs.params,
            scratch: work.best.view(),
            ids: work.ids.view(),
            rows: count,
            vocabulary: sizes.vocab,
        };
        sample.run(self.gpu)
    }
}
