//! The device that `--device` names.

use anyhow::Context;
use kernels::cuda::{CudaError, Gpu};

use crate::args::DeviceKind;
use crate::config::Config;

/// What computes, with what it takes to size a KV cache there.
pub enum Device {
    Cpu,
    Cuda {
        gpu: Gpu,
        /// Free bytes before anything of ours was there.
        free_before: usize,
    },
}

/// Opens it.
///
/// Errors: `--device cuda` without such a device; only `auto` falls back to the CPU, and warns.
pub fn open(config: &Config) -> anyhow::Result<Device> {
    let opened = match config.device {
        DeviceKind::Cpu | DeviceKind::Sim => return Ok(Device::Cpu),
        DeviceKind::Cuda(ordinal) => {
            open_cuda(config, ordinal).with_context(|| format!("--device cuda:{ordinal} cannot be used"))?
        }
        DeviceKind::Auto => match open_cuda(config, 0) {
            Ok(opened) => opened,
            Err(error) => {
                tracing::warn!(reason = %error, "--device auto: no CUDA device, computing on the CPU");
                return Ok(Device::Cpu);
            }
        },
    };
    let (gpu, free_before) = opened;
    let info = gpu.info();
    tracing::info!(
        device = info.ordinal,
        name = info.name,
        capability = format!("{}.{}", info.capability.0, info.capability.1),
        driver = info.driver,
        free_bytes = free_before,
        "CUDA device open"
    );
    Ok(Device::Cuda { gpu, free_before })
}

fn open_cuda(config: &Config, ordinal: usize) -> Result<(Gpu, usize), CudaError> {
    let gpu = match &config.cuda_emulator {
        Some(library) => Gpu::emulated(library, 0)?,
        None => Gpu::open(ordinal)?,
    };
    let (free, _) = gpu.memory()?;
    Ok((gpu, free))
}

impl Device {
    /// Bytes of the device's memory, and of this process in it.
    pub fn memory(&self) -> anyhow::Result<(usize, usize)> {
        match self {
            Device::Cpu => machine_memory().context("--gpu-memory-utilization needs /proc"),
            Device::Cuda { gpu, free_before } => {
                let (free, total) = gpu.memory()?;
                Ok((total, free_before.saturating_sub(free)))
            }
        }
    }
}

/// Bytes of the machine's memory, and of this process in it.
fn machine_memory() -> anyhow::Result<(usize, usize)> {
    let read = |file: &str, field: &str| -> anyhow::Result<usize> {
        let text = std::fs::read_to_string(file)?;
        let line = text.lines().find_map(|line| line.strip_prefix(field)).context("a field is missing")?;
        let kilobytes: usize = line.trim().trim_end_matches("kB").trim().parse()?;
        Ok(kilobytes << 10)
    };
    Ok((read("/proc/meminfo", "MemTotal:")?, read("/proc/self/status", "VmRSS:")?))
}
