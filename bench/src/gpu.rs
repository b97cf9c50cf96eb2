//! Which device a measurement runs on: `--device`.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use kernels::cuda::Gpu;
use serde::Serialize;

use crate::error::Result;

/// The processor, or a CUDA device by its number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum Device {
    #[default]
    Cpu,
    Cuda(usize),
}

impl FromStr for Device {
    type Err = &'static str;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        match text {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => {
                let number = text.strip_prefix("cuda:").and_then(|number| number.parse().ok());
                number.map(Self::Cuda).ok_or("expected cpu, cuda or cuda:N")
            }
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => write!(f, "cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl Device {
    /// Opens it; `None` is the processor. With `emulator`, CUDA devices are that library's.
    ///
    /// Errors: the build has no CUDA, the machine has no driver or no such device.
    pub fn open(self, emulator: Option<&Path>) -> Result<Option<Gpu>> {
        match (self, emulator) {
            (Self::Cpu, _) => Ok(None),
            (Self::Cuda(ordinal), Some(library)) => Ok(Some(Gpu::emulated_device(library, 0, ordinal)?)),
            (Self::Cuda(ordinal), None) => Ok(Some(Gpu::open(ordinal)?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_and_written_alike() {
        for (text, device) in [("cpu", Device::Cpu), ("cuda:0", Device::Cuda(0)), ("cuda:3", Device::Cuda(3))]
        {
            assert_eq!((text.parse(), device.to_string().as_str()), (Ok(device), text));
        }
        assert_eq!("cuda".parse(), Ok(Device::Cuda(0)));
        for bad in ["gpu", "cuda:", "cuda:-1", "cuda:x", ""] {
            assert!(bad.parse::<Device>().is_err(), "{bad:?}");
        }
    }
}
