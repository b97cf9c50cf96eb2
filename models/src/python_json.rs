//! The `tojson` filter of transformers' chat templates: `json.dumps(x, ensure_ascii=False)`.
//!
//! Python separates with ", " and ": ", keeps the order of keys, and prints floats in its own way. A model
//! that was trained on tool definitions in this form should see them in this form.

use std::io::{self, Write};

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

/// `value | tojson`, with `indent`, `separators` and `sort_keys` as keywords or by position as in transformers.
pub(crate) fn tojson(value: Value, kwargs: Kwargs) -> Result<Value, Error> {
    let ensure_ascii: Option<bool> = kwargs.get("ensure_ascii")?;
    let indent: Option<usize> = kwargs.get("indent")?;
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let sort_keys: Option<bool> = kwargs.get("sort_keys")?;
    kwargs.assert_all_used()?;
    let invalid = |reason: String| Error::new(ErrorKind::InvalidOperation, reason);
    if ensure_ascii == Some(true) {
        return Err(invalid("tojson(ensure_ascii=true) is not supported".into()));
    }
    let mut json = serde_json::to_value(&value).map_err(|error| invalid(error.to_string()))?;
    if sort_keys == Some(true) {
        json.sort_all_objects();
    }
    let (item, key) = match separators.as_deref() {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(invalid("tojson(separators=…) takes two strings".into())),
    };
    let text = to_string(&json, Python { indent, item, key, depth: 0, empty: true })
        .map_err(|error| invalid(error.to_string()))?;
    Ok(Value::from(text))
}

fn to_string(json: &serde_json::Value, style: Python) -> serde_json::Result<String> {
    let mut out = Vec::new();
    json.serialize(&mut Serializer::with_formatter(&mut out, style))?;
    Ok(String::from_utf8(out).expect("serde_json writes UTF-8. This is a bug."))
}

/// Python's `json.dumps` as a serde_json formatter.
struct Python {
    indent: Option<usize>,
    item: String,
    key: String,
    depth: usize,
    /// Nothing has been written yet in the innermost container.
    empty: bool,
}

impl Python {
    fn open<W: Write + ?Sized>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.empty = true;
        out.write_all(bracket)
    }

    fn close<W: Write + ?Sized>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if !self.empty {
            self.new_line(out)?;
        }
        self.empty = false;
        out.write_all(bracket)
    }

    fn item<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if !first {
            out.write_all(self.item.as_bytes())?;
        }
        self.empty = false;
        self.new_line(out)
    }

    fn new_line<W: Write + ?Sized>(&self, out: &mut W) -> io::Result<()> {
        match self.indent {
            Some(width) => write!(out, "\n{:1$}", "", width * self.depth),
            None => Ok(()),
        }
    }
}

impl Formatter for Python {
    fn write_f64<W: Write + ?Sized>(&mut self, out: &mut W, value: f64) -> io::Result<()> {
        out.write_all(float_repr(value).as_bytes())
    }
    fn begin_array<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"[")
    }
    fn end_array<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"]")
    }
    fn begin_array_value<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.item(out, first)
    }
    fn begin_object<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"{")
    }
    fn end_object<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"}")
    }
    fn begin_object_key<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.item(out, first)
    }
    fn begin_object_value<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.key.as_bytes())
    }
}

/// Python's `repr` of a float: the shortest digits that read back the same, with an exponent only below
/// 1e-4 and from 1e16, and then of at least two digits with its sign.
fn float_repr(value: f64) -> String {
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').expect("{:e} has an exponent. This is a bug.");
    let exponent: i32 = exponent.parse().expect("{:e} has a decimal exponent. This is a bug.");
    if value == 0.0 || (-4..16).contains(&exponent) {
        return format!("{value:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn style(indent: Option<usize>) -> Python {
        let item = if indent.is_some() { "," } else { ", " };
        Python { indent, item: item.into(), key: ": ".into(), depth: 0, empty: true }
    }

    /// The expected strings are CPython 3.11's.
    #[test]
    fn prints_as_json_dumps() {
        let value = json!({"b": [1, 2.0, {}], "a": {"ü<&>'": null, "t": true}, "e": []});
        let expected = r#"{"b": [1, 2.0, {}], "a": {"ü<&>'": null, "t": true}, "e": []}"#;
        assert_eq!(to_string(&value, style(None)).unwrap(), expected);
        let indented = "{\n  \"b\": [\n    1,\n    {}\n  ],\n  \"e\": []\n}";
        assert_eq!(to_string(&json!({"b": [1, {}], "e": []}), style(Some(2))).unwrap(), indented);
    }

    #[test]
    fn prints_floats_as_python() {
        let cases = [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (123456789012345680.0, "1.2345678901234568e+17"),
            (1e100, "1e+100"),
            (1.5e300, "1.5e+300"),
            (9999999999999998.0, "9999999999999998.0"),
        ];
        for (value, expected) in cases {
            assert_eq!(float_repr(value), expected);
        }
    }
}
