//! What the numbers were measured on.

use serde::Serialize;

/// Facts of this machine that a reader of the numbers needs.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    pub cpu_model: Option<String>,
    /// Cores that this process may use.
    pub cores: usize,
    pub memory_kib: Option<u64>,
    pub kernel: Option<String>,
}

/// Processes that ran or waited to, over the last 1, 5 and 15 minutes.
pub type Load = [f64; 3];

impl Machine {
    pub fn look() -> Self {
        Self {
            cpu_model: read("/proc/cpuinfo").and_then(|text| field(&text, "model name")),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_kib: read("/proc/meminfo").and_then(|text| memory_kib(&text)),
            kernel: read("/proc/sys/kernel/osrelease").map(|text| text.trim().to_owned()),
        }
    }
}

/// The load now; `None` where the system does not say.
pub fn load() -> Option<Load> {
    parse_load(&read("/proc/loadavg")?)
}

/// The most memory that this process has had in use; `None` where the system does not say.
pub fn peak_resident_bytes() -> Option<u64> {
    let kib = field(&read("/proc/self/status")?, "VmHWM")?;
    kib.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn parse_load(text: &str) -> Option<Load> {
    let numbers: Vec<f64> = text.split_whitespace().take(3).filter_map(|word| word.parse().ok()).collect();
    numbers.try_into().ok()
}

fn memory_kib(text: &str) -> Option<u64> {
    field(text, "MemTotal")?.split_whitespace().next()?.parse().ok()
}

/// The value of the first `key: value` line.
fn field(text: &str, key: &str) -> Option<String> {
    let pairs = text.lines().filter_map(|line| line.split_once(':'));
    pairs.filter(|(name, _)| name.trim() == key).map(|(_, value)| value.trim().to_owned()).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linux_says_it_in_its_own_formats() {
        let cpuinfo = "processor\t: 0\nmodel name\t: AMD EPYC: 9\n\nprocessor\t: 1\nmodel name\t: other\n";
        assert_eq!(field(cpuinfo, "model name").as_deref(), Some("AMD EPYC: 9"));
        assert_eq!(memory_kib("MemTotal:       24681012 kB\nMemFree: 1 kB\n"), Some(24_681_012));
        assert_eq!(parse_load("2.96 3.46 3.57 3/310 9876\n"), Some([2.96, 3.46, 3.57]));
        assert_eq!(parse_load("busy"), None);
    }
}
