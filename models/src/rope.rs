//! Rotary position tables.

use candle_core::{Device, Result, Tensor};

/// Cosines and sines of every position below `max_len`: two f32 tensors `[max_len, head_dim / 2]`.
///
/// Angles are `position / theta^(2i / head_dim)` (Su et al. 2021), rounded to f32 where transformers rounds them, so
/// that long prompts agree with it.
pub fn tables(head_dim: usize, theta: f64, max_len: usize, device: &Device) -> Result<(Tensor, Tensor)> {
    let half = head_dim / 2;
    let inverse: Vec<f32> =
        (0..half).map(|i| theta.powf(-((2 * i) as f64) / head_dim as f64) as f32).collect();
    let angles: Vec<f32> =
        (0..max_len).flat_map(|position| inverse.iter().map(move |inv| position as f32 * inv)).collect();
    let angles = Tensor::from_vec(angles, (max_len, half), device)?;
    Ok((angles.cos()?, angles.sin()?))
}
