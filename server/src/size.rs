//! Sizes in bytes as people write them: `1073741824`, `512MiB`, `1GiB`, `2GB`.

use std::fmt;
use std::str::FromStr;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

const UNITS: [(&str, u64); 10] = [
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

/// The text is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected a size of at least 1 byte and below 16777216TiB, such as 1073741824, 512MiB or 1GiB")]
pub struct NotASize;

impl FromStr for ByteSize {
    type Err = NotASize;

    fn from_str(text: &str) -> Result<Self, NotASize> {
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = (text[..digits].parse::<u64>().map_err(|_| NotASize)?, text[digits..].trim());
        let factor = match unit {
            "" => 1,
            _ => UNITS.iter().find(|(name, _)| *name == unit).ok_or(NotASize)?.1,
        };
        number.checked_mul(factor).filter(|&bytes| bytes > 0).map(ByteSize).ok_or(NotASize)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let binary =
            UNITS[1..=4].iter().rev().find(|(_, factor)| self.0.is_multiple_of(*factor) && self.0 > 0);
        match binary {
            Some((unit, factor)) => write!(f, "{}{unit}", self.0 / factor),
            None => write!(f, "{}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown() {
        let cases =
            [("1GiB", 1 << 30), ("512MiB", 512 << 20), ("4096", 4096), ("2 GB", 2_000_000_000), ("7B", 7)];
        for (text, bytes) in cases {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for size in [1, 1000, 1 << 10, 3 << 20, 1 << 40] {
            assert_eq!(ByteSize(size).to_string().parse(), Ok(ByteSize(size)));
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for text in ["", "0", "GiB", "-1", "1.5GiB", "1GIB", "99999999999999999999", "99999999TiB", "1 GiB x"]
        {
            assert_eq!(text.parse::<ByteSize>(), Err(NotASize), "{text}");
        }
    }
}
