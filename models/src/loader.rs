//! Turns tensors of the checkpoint into the forward pass's own, joined, packed and converted as asked.

use candle_core::{Device, Tensor};
use half::bf16;
use kernels::cpu::arena::{Arena, release_file_pages};
use kernels::cpu::{Packed, Precision};
use kernels::ops::Weight;

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::qwen::{ComputeDtype, Layer, Linear};
use crate::weights::{WeightDtype, WeightView, Weights};

type Loaded<T> = std::result::Result<T, ModelError>;

/// Packs parts of equal width.
type Pack = fn(&mut Arena, &[&[u8]], usize, Precision) -> std::io::Result<Packed>;

pub(crate) struct Loader<'a> {
    config: &'a ModelConfig,
    weights: &'a Weights,
    dtype: ComputeDtype,
    device: &'a Device,
    /// Where packed weights go, one after another in the order in which a step reads them.
    arena: Arena,
}

impl<'a> Loader<'a> {
    pub fn new(
        config: &'a ModelConfig,
        weights: &'a Weights,
        dtype: ComputeDtype,
        device: &'a Device,
    ) -> Self {
        let loader = Self { config, weights, dtype, device, arena: Arena::default() };
        // Whoever checked the files may have read them.
        loader.release_files();
        loader
    }

    pub fn layer(&mut self, layer: usize) -> Loaded<Layer> {
        let config = self.config;
        let name = |tensor: &str| format!("model.layers.{layer}.{tensor}");
        let precision = match self.dtype {
            ComputeDtype::Int8 => Precision::Int8,
            _ => Precision::Bf16,
        };
        let mut linear = |parts: &[&str], has_bias: bool| -> Loaded<Linear> {
            let named =
                |suffix: &str| parts.iter().map(|part| name(&format!("{part}.{suffix}"))).collect::<Vec<_>>();
            let weight = match parts {
                ["mlp.gate_proj", ..] => self.joined(&named("weight"), Packed::gated, precision)?,
                _ => self.joined(&named("weight"), Packed::new, precision)?,
            };
            let bias = has_bias.then(|| self.joined_bias(&named("bias"))).transpose()?;
            Ok(Linear { weight, bias })
        };
        let qkv = linear(&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], config.qkv_bias)?;
        let out = linear(&["self_attn.o_proj"], config.o_bias)?;
        let gate_up = linear(&["mlp.gate_proj", "mlp.up_proj"], false)?;
        let down = linear(&["mlp.down_proj"], false)?;
        let norm = |tensor: &str| self.vector(&name(tensor));
        let qk_norm = match config.qk_norm {
            true => Some((norm("self_attn.q_norm.weight")?, norm("self_attn.k_norm.weight")?)),
            false => None,
        };
        let (input_norm, post_norm) =
            (norm("input_layernorm.weight")?, norm("post_attention_layernorm.weight")?);
        Ok(Layer { input_norm, qkv, qk_norm, out, post_norm, gate_up, down })
    }

    /// An embedding table or head.
    pub fn table(&mut self, name: &str) -> Loaded<Weight> {
        self.joined(&[name], Packed::new, Precision::Bf16)
    }

    /// Matrices of equal width stacked by rows. Parts of different dtypes become f32.
    fn joined<S: AsRef<str>>(&mut self, names: &[S], pack: Pack, precision: Precision) -> Loaded<Weight> {
        let views = names.iter().map(|name| self.weights.view(name.as_ref())).collect::<Loaded<Vec<_>>>()?;
        let width = views[0].shape[1];
        let rows: usize = views.iter().map(|view| view.shape[0]).sum();
        let stored = views[0].dtype;
        let dtype = match self.dtype {
            ComputeDtype::F32 => WeightDtype::F32,
            ComputeDtype::Bf16 | ComputeDtype::Int8 => WeightDtype::BF16,
            ComputeDtype::Stored if views.iter().any(|view| view.dtype != stored) => WeightDtype::F32,
            ComputeDtype::Stored => stored,
        };
        let weight = match dtype {
            WeightDtype::BF16 => Weight::Packed(self.packed(&views, width, pack, precision)?),
            WeightDtype::F16 => {
                let halves = views.iter().flat_map(|view| view.bytes.as_chunks::<2>().0);
                let halves = halves.map(|bytes| half::f16::from_le_bytes(*bytes)).collect::<Vec<_>>();
                Weight::Stored(Tensor::from_vec(halves, (rows, width), self.device)?)
            }
            WeightDtype::F32 => {
                let values = views.iter().flat_map(|view| view.to_f32()).collect();
                Weight::Stored(Tensor::from_vec::<_, f32>(values, (rows, width), self.device)?)
            }
        };
        views.iter().for_each(|view| release(view.bytes));
        Ok(weight)
    }

    fn packed(
        &mut self,
        views: &[WeightView<'_>],
        width: usize,
        pack: Pack,
        precision: Precision,
    ) -> Loaded<Packed> {
        let rounded: Vec<Option<Vec<bf16>>> =
            views.iter().map(|view| (view.dtype != WeightDtype::BF16).then(|| view.to_bf16())).collect();
        let parts: Vec<&[u8]> = views
            .iter()
            .zip(&rounded)
            .map(|(view, rounded)| rounded.as_ref().map_or(view.bytes, |values| bytemuck::cast_slice(values)))
            .collect();
        Ok(pack(&mut self.arena, &parts, width, precision).map_err(candle_core::Error::from)?)
    }

    /// Norm weights are few and always f32.
    pub fn vector(&self, name: &str) -> Loaded<Tensor> {
        self.joined_bias(&[name])
    }

    fn joined_bias<S: AsRef<str>>(&self, names: &[S]) -> Loaded<Tensor> {
        let mut values = Vec::new();
        for name in names {
            values.extend(self.weights.tensor_f32(name.as_ref())?);
        }
        let len = values.len();
        Ok(Tensor::from_vec(values, len, self.device)?)
    }

    /// Gives back the pages of everything that was read so far.
    pub fn release_files(&self) {
        let views = self.weights.names().filter_map(|name| self.weights.view(name).ok());
        views.for_each(|view| release(view.bytes));
    }
}

fn release(bytes: &[u8]) {
    // SAFETY: views are into read-only mappings of the checkpoint's files.
    unsafe { release_file_pages(bytes) };
}
