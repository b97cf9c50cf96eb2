//! One step after another on a device: uploads, graphs, downloads.

use std::collections::HashMap;
use std::sync::Arc;

use kernels::KvPool;
use kernels::cuda::attention::splits;
use kernels::cuda::blocks::{Side, copy_blocks};
use kernels::cuda::{Buffer, CudaError, Gpu, Graph, Pinned, PoolView};

use super::classes::Class;
use super::forward::Forward;
use super::inputs::{Shape, pack};
use super::weights::GpuWeights;
use super::workspace::{Capacity, Workspace};
use super::{GpuLimits, Sizes};
use crate::model::{Answer, Batch, Draw, Model, Row};

type Result<T> = std::result::Result<T, CudaError>;

/// A model on a CUDA device, with what it computes in.
#[derive(Debug)]
pub struct GpuModel {
    /// Before the buffers whose addresses they hold.
    graphs: HashMap<Class, Captured>,
    captures: usize,
    eager: bool,
    gpu: Gpu,
    sizes: Sizes,
    eps: f32,
    weights: GpuWeights,
    valid: Buffer,
    work: Workspace,
    /// A step's numbers on the host and on the device.
    staged: Pinned,
    inputs: Buffer,
    /// Sampled ids on the host.
    ids: Pinned,
}

/// Layers between two marks: a quarter of Qwen3-0.6B's, whose KV of 1,500 tokens is 43 MB, a millisecond over NVLink.
const MARKED_LAYERS: usize = 7;

/// What is known of a class.
#[derive(Debug)]
enum Captured {
    /// It ran once: kernels are loaded and libraries have chosen their algorithms, which a capture must not do.
    Seen,
    Graph(Graph),
    /// It is launched kernel by kernel, because graphs are not wanted or the driver refused to capture it.
    Plain,
}

impl GpuModel {
    pub(super) fn new(
        gpu: &Gpu,
        sizes: Sizes,
        weights: GpuWeights,
        limits: GpuLimits,
        valid: &[bool],
        eps: f32,
    ) -> Result<Self> {
        // A class may pad rows to the next power of two.
        let rows = limits.max_rows.max(limits.max_seqs.next_power_of_two());
        let samples = limits.max_seqs.next_power_of_two();
        let capacity = Capacity { rows, samples, splits: samples.max(splits(limits.max_len)) };
        let bytes = Shape { rows, samples, ..Shape::default() }.bytes() + 4 * limits.max_len;
        Ok(Self {
            graphs: HashMap::new(),
            eager: limits.eager,
            captures: 0,
            gpu: gpu.clone(),
            sizes,
            eps,
            weights,
            valid: gpu.buffer_of(&valid.iter().map(|valid| u8::from(*valid)).collect::<Vec<_>>())?,
            work: Workspace::new(gpu, &sizes, capacity)?,
            staged: gpu.pinned(bytes)?,
            inputs: gpu.alloc(bytes)?,
            ids: gpu.pinned(4 * samples)?,
        })
    }

    /// Steps captured as graphs so far. More of them than size classes that were used: memory had to grow in between.
    pub fn captures(&self) -> usize {
        self.captures
    }

    /// Uploads the batch in the places of `shape` and makes room for it.
    fn upload(&mut self, batch: &Batch, draws: &[Option<Draw>], shape: Shape) -> Result<()> {
        let bytes = shape.bytes();
        if bytes > self.inputs.bytes() {
            self.graphs.clear();
            self.staged = self.gpu.pinned(bytes.next_power_of_two())?;
            self.inputs = self.gpu.alloc(bytes.next_power_of_two())?;
        }
        let group = self.sizes.heads / self.sizes.kv_heads;
        let splits = pack(batch, draws, shape, group, self.staged.bytes_mut());
        let needed = Capacity { rows: shape.rows, samples: shape.samples, splits };
        if !self.work.capacity.holds(&needed) {
            self.graphs.clear();
            // Contexts grow by a split now and then: without room for more, every such step would drop the graphs.
            let roomy = Capacity { splits: splits.next_power_of_two(), ..needed };
            let capacity = self.work.capacity.max(&roomy);
            self.work = Workspace::new(&self.gpu, &self.sizes, capacity)?;
        }
        if self.ids.bytes().len() < 4 * shape.samples {
            self.ids = self.gpu.pinned(4 * shape.samples)?;
        }
        // SAFETY: this step ends with a download that waits for the stream, before the next writes the pinned memory.
        unsafe { self.gpu.upload(self.inputs.view().part(0, bytes), &self.staged) }
    }

    /// The shape that a decoding step is padded to.
    fn class_shape(class: Class, block_size: usize) -> Shape {
        Shape {
            rows: class.rows,
            decode: class.rows,
            max_context: class.context,
            tables: class.rows * class.context.div_ceil(block_size),
            samples: class.rows,
            ..Shape::default()
        }
    }

    fn forward<'a>(&'a self, shape: Shape, pool: PoolView<'a>) -> Forward<'a> {
        Forward {
            gpu: &self.gpu,
            sizes: self.sizes,
            eps: self.eps,
            weights: &self.weights,
            work: &self.work,
            inputs: shape.views(&self.inputs),
            shape,
            pool,
            valid: &self.valid,
        }
    }

    /// Runs a step of a class: plainly the first time, captured the second, from then on as a graph. A driver that does not
    /// capture it costs speed, not the step.
    fn run_class(&mut self, class: Class, shape: Shape, pool: PoolView<'_>) -> Result<()> {
        match self.graphs.get(&class) {
            None => {
                self.forward(shape, pool).launch(|_| Ok(()))?;
                self.graphs.insert(class, if self.eager { Captured::Plain } else { Captured::Seen });
            }
            Some(Captured::Plain) => self.forward(shape, pool).launch(|_| Ok(()))?,
            Some(Captured::Seen) => {
                let forward = self.forward(shape, pool);
                let graph = match self.gpu.capture(|| forward.launch(|_| Ok(()))) {
                    Ok(graph) => graph,
                    Err(error) => {
                        tracing::warn!(%error, class.rows, class.context, "a step is not captured as a graph, and runs slower");
                        forward.launch(|_| Ok(()))?;
                        self.graphs.insert(class, Captured::Plain);
                        return Ok(());
                    }
                };
                // SAFETY: the graph's buffers are this model's and the pool's; both outlive it, see `graphs`.
                unsafe { graph.replay()? };
                self.graphs.insert(class, Captured::Graph(graph));
                self.captures += 1;
                tracing::debug!(class.rows, class.context, self.captures, "a step was captured as a graph");
            }
            // SAFETY: as above.
            Some(Captured::Graph(graph)) => unsafe { graph.replay()? },
        }
        Ok(())
    }

    /// Runs a step that is not captured, and tells of layers as the device finishes them: their KV can go while the next
    /// ones are computed.
    fn run_plain(&self, shape: Shape, pool: PoolView<'_>, progress: &mut dyn FnMut(usize)) -> Result<()> {
        let mut marks = Vec::new();
        self.forward(shape, pool).launch(|layers| {
            if layers.is_multiple_of(MARKED_LAYERS) {
                marks.push((layers, self.gpu.mark()?));
            }
            Ok(())
        })?;
        for (layers, mark) in marks {
            mark.wait()?;
            progress(layers);
        }
        Ok(())
    }

    fn run(
        &mut self,
        batch: &Batch,
        draws: &[Option<Draw>],
        pool: &KvPool,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Answer> {
        let pool = pool.on_device().expect("a model on a GPU has its pool there. This is a bug.");
        let own = Shape::of(batch, self.sizes.heads / self.sizes.kv_heads);
        // Every row decodes and is sampled: anything else is too seldom to be captured.
        let only_decodes = own.decode == own.rows && own.samples == own.rows;
        match Class::of(own.rows, own.max_context).filter(|_| only_decodes) {
            Some(class) => {
                let shape = Self::class_shape(class, pool.layout.block_size);
                self.upload(batch, draws, shape)?;
                self.run_class(class, shape, pool)?;
            }
            None => {
                self.upload(batch, draws, own)?;
                self.run_plain(own, pool, progress)?;
            }
        }
        if own.samples == 0 {
            // The pinned inputs are written again by the next step.
            self.gpu.synchronize()?;
            return Ok(Answer::default());
        }
        self.gpu.download(&mut self.ids, self.work.ids.view().part(0, 4 * own.samples))?;
        let ids: Vec<i32> = self.ids.bytes()[..4 * own.samples]
            .as_chunks()
            .0
            .iter()
            .map(|id| i32::from_ne_bytes(*id))
            .collect();
        let mut answer = Answer::default();
        for (row, (id, draw)) in ids.iter().zip(draws).enumerate() {
            if draw.is_some() {
                answer.rows.push(Row::Token(u32::try_from(*id).ok()));
                continue;
            }
            answer.rows.push(Row::Logits);
            let start = answer.logits.len();
            answer.logits.resize(start + self.sizes.vocab, 0.0);
            let to: &mut [u8] = bytemuck::cast_slice_mut(&mut answer.logits[start..]);
            self.work.logits.read(row * to.len(), to)?;
        }
        Ok(answer)
    }
}

impl Model for GpuModel {
    fn step(
        &mut self,
        batch: &Batch,
        draws: &[Option<Draw>],
        pool: &Arc<KvPool>,
        progress: &mut dyn FnMut(usize),
    ) -> std::result::Result<Answer, String> {
        self.run(batch, draws, pool, progress).map_err(|error| error.to_string())
    }

    fn check(&mut self) -> std::result::Result<(), String> {
        // After an error that breaks the context every call fails, these too.
        let works = || -> Result<()> {
            let (from, to) = (self.gpu.zeroed(CHECKED)?, self.gpu.zeroed(CHECKED)?);
            let side = |buffer| Side { blocks: buffer, ids: None };
            copy_blocks(&self.gpu, side(to.view()), side(from.view()), 1, CHECKED)?;
            self.gpu.synchronize()
        };
        match works() {
            // Memory may be short for a moment; that is no reason to give up.
            Err(CudaError::OutOfMemory { .. }) | Ok(()) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Bytes that a check copies.
const CHECKED: usize = 4096;
