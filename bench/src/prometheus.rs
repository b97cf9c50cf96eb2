//! Reads Prometheus' text format: as much of it as counters, gauges and the sums and counts of histograms need.

/// One sample.
#[derive(Clone, Debug, PartialEq)]
struct Sample {
    name: String,
    labels: Vec<(String, String)>,
    value: f64,
}

/// A scrape of `/metrics`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scrape(Vec<Sample>);

impl Scrape {
    /// Fails with the line that cannot be read.
    pub fn parse(text: &str) -> Result<Self, String> {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        lines.map(|line| sample(line).ok_or_else(|| line.to_owned())).collect::<Result<_, _>>().map(Self)
    }

    /// The sum over all samples of this name that have these labels, whatever others they have; 0 if there is none,
    /// which is what a series is before its first observation.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let has = |sample: &Sample, (key, value): &(&str, &str)| {
            sample.labels.iter().any(|(k, v)| k == key && v == value)
        };
        let matching = self.0.iter().filter(|s| s.name == name && labels.iter().all(|label| has(s, label)));
        matching.map(|sample| sample.value).sum()
    }
}

fn sample(line: &str) -> Option<Sample> {
    let name_end = line.find(|c: char| c == '{' || c.is_whitespace())?;
    let (name, rest) = line.split_at(name_end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(inside) => self::labels(inside)?,
        None => (Vec::new(), rest),
    };
    // A timestamp may follow the value.
    let value = rest.split_whitespace().next()?;
    let value = match value {
        "+Inf" => f64::INFINITY,
        "-Inf" => f64::NEG_INFINITY,
        number => number.parse().ok()?,
    };
    Some(Sample { name: name.to_owned(), labels, value })
}

/// The labels up to the closing brace, and what follows it.
fn labels(mut text: &str) -> Option<(Vec<(String, String)>, &str)> {
    let mut labels = Vec::new();
    loop {
        text = text.trim_start_matches([',', ' ']);
        if let Some(rest) = text.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (key, rest) = text.split_once("=\"")?;
        let (value, rest) = quoted(rest)?;
        labels.push((key.trim().to_owned(), value));
        text = rest;
    }
}

/// The text up to the closing quote, unescaped, and what follows it.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_found_by_name_and_labels() {
        let text = "# HELP a:b_sum c\n# TYPE a:b histogram\n\
                    a:b_sum{stage=\"wire\",model_name=\"m\"} 0.25\na:b_sum{stage=\"post\",model_name=\"m\"} 1e-3 1700000000\n\
                    a:b_bucket{le=\"+Inf\"} 7\nplain 3\nempty{} 4\nx +Inf\n";
        let scrape = Scrape::parse(text).unwrap();
        assert_eq!(scrape.sum("a:b_sum", &[("stage", "wire")]), 0.25);
        assert_eq!(scrape.sum("a:b_sum", &[("model_name", "m")]), 0.251);
        assert_eq!(scrape.sum("a:b_sum", &[("stage", "queue")]), 0.0);
        assert_eq!(scrape.sum("a:b_bucket", &[("le", "+Inf")]), 7.0);
        assert_eq!((scrape.sum("plain", &[]), scrape.sum("empty", &[])), (3.0, 4.0));
        assert_eq!(scrape.sum("x", &[]), f64::INFINITY);
        assert_eq!(scrape.sum("missing", &[]), 0.0);
    }

    #[test]
    fn label_values_may_hold_anything() {
        let scrape = Scrape::parse(r#"a{m="x\"},{y=\"\\ \n",n="=,}"} 1"#).unwrap();
        assert_eq!(scrape.sum("a", &[("m", "x\"},{y=\"\\ \n"), ("n", "=,}")]), 1.0);
    }

    #[test]
    fn a_line_that_cannot_be_read_is_named() {
        for line in ["a", "a{b} 1", "a{b=\"c} 1", "a one", "a{b=\"c\"}"] {
            assert_eq!(Scrape::parse(&format!("ok 1\n{line}\n")), Err(line.to_owned()));
        }
    }
}
