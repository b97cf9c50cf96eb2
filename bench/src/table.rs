//! Tables for a terminal.

use std::fmt;

/// Between two columns.
const GAP: &str = "  ";

/// Rows under a header. Columns are right-aligned but for those that hold words.
#[derive(Clone, Debug)]
pub struct Table {
    header: Vec<String>,
    left: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A header that starts with `<` is of a left-aligned column.
    pub fn new(header: &[&str]) -> Self {
        let left = header.iter().map(|name| name.starts_with('<')).collect();
        let header = header.iter().map(|name| name.trim_start_matches('<').to_owned()).collect();
        Self { header, left, rows: Vec::new() }
    }

    /// Missing cells are empty.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let mut cells: Vec<_> = cells.into_iter().collect();
        assert!(cells.len() <= self.header.len(), "a row has at most a cell per column. This is a bug.");
        cells.resize(self.header.len(), String::new());
        self.rows.push(cells);
    }

    fn line(&self, f: &mut fmt::Formatter<'_>, cells: &[String], widths: &[usize]) -> fmt::Result {
        let mut line = String::new();
        for ((cell, &width), &left) in cells.iter().zip(widths).zip(&self.left) {
            let gap = if line.is_empty() { "" } else { GAP };
            match left {
                true => line += &format!("{gap}{cell:<width$}"),
                false => line += &format!("{gap}{cell:>width$}"),
            }
        }
        writeln!(f, "{}", line.trim_end())
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| &row[column]).chain([&self.header[column]]);
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<_> = (0..self.header.len()).map(width).collect();
        self.line(f, &self.header, &widths)?;
        let rule: Vec<_> = widths.iter().map(|&width| "-".repeat(width)).collect();
        self.line(f, &rule, &widths)?;
        self.rows.iter().try_for_each(|row| self.line(f, row, &widths))
    }
}

/// A whole number with its thousands set apart.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Milliseconds, with as many decimals as say something.
pub fn ms(value: f64) -> String {
    match value {
        value if value < 10.0 => format!("{value:.2}"),
        value if value < 100.0 => format!("{value:.1}"),
        value => format!("{value:.0}"),
    }
}

/// What to show for something that was not measured.
pub fn or_dash(value: Option<String>) -> String {
    value.unwrap_or_else(|| "-".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&["<name", "ms", "x"]);
        table.row(["both".into(), "9.5".into()]);
        table.row(["prefill + décode".into(), "12345".into(), "1.1".into()]);
        let expected = "\
name                 ms    x
----------------  -----  ---
both                9.5
prefill + décode  12345  1.1
";
        assert_eq!(table.to_string(), expected);
    }

    #[test]
    fn numbers_are_readable() {
        assert_eq!(
            [0, 999, 1000, 1234567].map(grouped),
            ["0", "999", "1,000", "1,234,567"].map(str::to_owned)
        );
        assert_eq!([0.123, 12.34, 123.4].map(ms), ["0.12", "12.3", "123"].map(str::to_owned));
    }
}
