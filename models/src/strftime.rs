//! `strftime` in UTC for chat templates that print the date; a pure function of the time.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Formats `time` by the directives of C that chat templates use.
///
/// # Errors
/// Names a directive that is not known.
pub(crate) fn strftime(time: SystemTime, format: &str) -> Result<String, String> {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let weekday = DAYS[((days + 4) % 7) as usize];
    let month_name = MONTHS[month as usize - 1];
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);

    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let directive = chars.next();
        let written = match directive {
            Some('Y') => write!(out, "{year}"),
            Some('y') => write!(out, "{:02}", year % 100),
            Some('m') => write!(out, "{month:02}"),
            Some('d') => write!(out, "{day:02}"),
            Some('e') => write!(out, "{day:2}"),
            Some('B') => write!(out, "{month_name}"),
            Some('b') => write!(out, "{}", &month_name[..3]),
            Some('A') => write!(out, "{weekday}"),
            Some('a') => write!(out, "{}", &weekday[..3]),
            Some('H') => write!(out, "{hour:02}"),
            Some('I') => write!(out, "{:02}", (hour + 11) % 12 + 1),
            Some('p') => write!(out, "{}", if hour < 12 { "AM" } else { "PM" }),
            Some('M') => write!(out, "{minute:02}"),
            Some('S') => write!(out, "{second:02}"),
            Some('F') => write!(out, "{year}-{month:02}-{day:02}"),
            Some('T') => write!(out, "{hour:02}:{minute:02}:{second:02}"),
            Some('%') => write!(out, "%"),
            other => {
                let other = other.map(String::from).unwrap_or_default();
                return Err(format!("strftime_now does not know %{other}"));
            }
        };
        written.expect("writing to a String cannot fail. This is a bug.");
    }
    Ok(out)
}

/// Year, month and day of a day number since 1970-01-01 (Howard Hinnant, "chrono-Compatible Low-Level Date
/// Algorithms", civil_from_days). Years start in March there, so that the leap day is the last.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year + era * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// The expected strings are those of `date -u -d @SECONDS`.
    #[test]
    fn formats_known_days() {
        let format = |seconds| strftime(UNIX_EPOCH + Duration::from_secs(seconds), "%a %d %b %Y %I:%M:%S %p");
        assert_eq!(format(0).unwrap(), "Thu 01 Jan 1970 12:00:00 AM");
        assert_eq!(format(951_782_400).unwrap(), "Tue 29 Feb 2000 12:00:00 AM");
        assert_eq!(format(1_735_689_599).unwrap(), "Tue 31 Dec 2024 11:59:59 PM");
        assert_eq!(format(4_107_542_400).unwrap(), "Mon 01 Mar 2100 12:00:00 AM");
    }

    #[test]
    fn unknown_directive_is_named() {
        assert_eq!(strftime(UNIX_EPOCH, "%Q").unwrap_err(), "strftime_now does not know %Q");
    }
}
