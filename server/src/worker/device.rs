//! The device that `--device` names, and what of its memory a worker may fill.

use anyhow::Context;
use kernels::cuda::{CudaError, Gpu};

use crate::args::DeviceKind;
use crate::config::Config;

/// What computes.
pub enum Device {
    Cpu,
    Cuda(Gpu),
}

/// What a process takes of a GPU's memory beside what it allocates: the driver's context and code (some 0.5 GiB on Hopper),
/// cuBLASLt's kernels and scratch, graphs, and UCX's staging.
const OVERHEAD: usize = 1 << 30;

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
    let gpu = opened;
    let (info, (free, total)) = (gpu.info(), gpu.memory()?);
    tracing::info!(
        device = info.ordinal,
        name = info.name,
        capability = format!("{}.{}", info.capability.0, info.capability.1),
        driver = info.driver,
        free_bytes = free,
        total_bytes = total,
        "CUDA device open"
    );
    Ok(Device::Cuda(gpu))
}

fn open_cuda(config: &Config, ordinal: usize) -> Result<Gpu, CudaError> {
    match &config.cuda_emulator {
        Some(library) => Gpu::emulated_device(library, 0, ordinal),
        None => Gpu::open(ordinal),
    }
}

impl Device {
    /// Bytes of the device's memory, and of this process in it. On a GPU ours are counted as they are allocated: what is free
    /// there changes with other processes, which may be starting at the same time.
    pub fn memory(&self) -> anyhow::Result<(usize, usize)> {
        match self {
            Device::Cpu => machine_memory().context("--gpu-memory-utilization needs /proc"),
            Device::Cuda(gpu) => {
                let overhead = if gpu.is_emulated() { 0 } else { OVERHEAD };
                Ok((gpu.memory()?.1, gpu.allocated() + overhead))
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
