//! One declaration per parameter: parsing, help, man page and completion are derived from it.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::spec::percent_decode_value;
use crate::{parse_duration, parse_number, parse_rate, parse_size, parse_switch};
use blockhaul_block::{Error, Kind, Result};

/// A parameter of a backend or a layer, given as `key=value`.
#[derive(Debug, Clone, Copy)]
pub struct Param {
    /// The key.
    pub name: &'static str,
    /// The type of the value.
    pub kind: ParamKind,
    /// The default value, as typed; `None`: no default.
    pub default: Option<&'static str>,
    /// One sentence for the help and the manual.
    pub doc: &'static str,
}

/// The type of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParamKind {
    /// Bytes: `10G`.
    Size,
    /// Bytes per second: `100M`.
    Rate,
    /// A time: `50ms`.
    Duration,
    /// A whole number: `12`, `0x0c`, `014`.
    Number,
    /// A share, as `30%`, `0.3`, `3:10` or `3/10`.
    Share,
    /// `on` or `off` (also yes, no, true, false, their first letters, 1, 0).
    Switch,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// Any text.
    Text,
}

impl ParamKind {
    /// The placeholder for the value in the help.
    pub fn placeholder(self) -> String {
        match self {
            ParamKind::Size => "SIZE".into(),
            ParamKind::Rate => "RATE".into(),
            ParamKind::Duration => "TIME".into(),
            ParamKind::Number => "N".into(),
            ParamKind::Share => "PERCENT".into(),
            ParamKind::Switch => "on|off".into(),
            ParamKind::Choice(words) => words.join("|"),
            ParamKind::Text => "TEXT".into(),
        }
    }

    fn check(self, text: &str) -> Result<()> {
        match self {
            ParamKind::Size => parse_size(text).map(drop),
            ParamKind::Rate => parse_rate(text).map(drop),
            ParamKind::Duration => parse_duration(text).map(drop),
            ParamKind::Number => parse_number::<u64>(text).map(drop),
            ParamKind::Share => share(text).map(drop),
            ParamKind::Switch => parse_switch(text).map(drop),
            ParamKind::Choice(words) if words.contains(&text) => Ok(()),
            ParamKind::Choice(words) => {
                let text = format!("{text:?} is not one of {}", words.join(", "));
                Err(Error::new(Kind::Usage, text))
            }
            ParamKind::Text => Ok(()),
        }
    }
}

/// Values of declared parameters, each checked against its declaration.
#[derive(Debug, Clone, Default)]
pub struct ParamValues {
    values: BTreeMap<&'static str, String>,
    others: Vec<(String, String)>,
}

impl ParamValues {
    /// Checks typed options against the declarations of `owner` (for messages).
    ///
    /// # Errors
    /// [`Kind::Usage`] if an option is unknown, with the known ones, or its value has the wrong
    /// type.
    pub fn check(owner: &str, params: &[Param], typed: &[(String, String)]) -> Result<ParamValues> {
        let mut values = BTreeMap::new();
        for (key, value) in typed {
            let Some(param) = params.iter().find(|param| param.name == key) else {
                return Err(unknown(owner, params, key));
            };
            param.kind.check(value).map_err(|error| {
                Error::new(Kind::Usage, format!("{owner}: {key}: {}", error.text()))
            })?;
            if values.insert(param.name, value.clone()).is_some() {
                return Err(Error::new(Kind::Usage, format!("{owner}: {key} is given twice")));
            }
        }
        for param in params {
            if let Some(default) = param.default {
                values.entry(param.name).or_insert_with(|| default.to_string());
            }
        }
        Ok(ParamValues { values, others: Vec::new() })
    }

    /// Like [`ParamValues::check`]; undeclared options are kept as typed.
    pub(crate) fn check_known(
        owner: &str,
        params: &[Param],
        typed: &[(String, String)],
    ) -> Result<ParamValues> {
        let declared = |key: &str| params.iter().any(|param| param.name == key);
        let (known, others): (Vec<_>, Vec<_>) =
            typed.iter().cloned().partition(|(key, _)| declared(key));
        Ok(ParamValues { others, ..ParamValues::check(owner, params, &known)? })
    }

    /// Undeclared options, in the order in which they were typed.
    pub fn others(&self) -> &[(String, String)] {
        &self.others
    }

    /// The text of a value, typed or default.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.values.get(name).map(String::as_str)
    }

    /// A size in bytes.
    pub fn size(&self, name: &str) -> Option<u64> {
        self.text(name).and_then(|text| parse_size(text).ok())
    }

    /// A rate in bytes per second.
    pub fn rate(&self, name: &str) -> Option<u64> {
        self.text(name).and_then(|text| parse_rate(text).ok())
    }

    /// A time.
    pub fn duration(&self, name: &str) -> Option<Duration> {
        self.text(name).and_then(|text| parse_duration(text).ok())
    }

    /// A whole number.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.text(name).and_then(|text| parse_number(text).ok())
    }

    /// A share between 0 and 1.
    pub fn share(&self, name: &str) -> Option<f64> {
        self.text(name).and_then(|text| share(text).ok())
    }

    /// A switch; off by default.
    pub fn switch(&self, name: &str) -> bool {
        self.text(name).and_then(|text| parse_switch(text).ok()).unwrap_or(false)
    }
}

fn unknown(owner: &str, params: &[Param], key: &str) -> Error {
    let known: Vec<_> = params.iter().map(|param| param.name).collect();
    let known = if known.is_empty() {
        format!("{owner} takes none")
    } else {
        format!("known are {}", known.join(", "))
    };
    Error::new(Kind::Usage, format!("{owner}: unknown option {key:?}; {known}"))
}

/// Splits `key=value&key=value`, both percent-decoded.
///
/// # Errors
/// [`Kind::Usage`] if a part has no `=`, or like [`percent_decode`](crate::percent_decode).
pub fn parse_options(text: &str) -> Result<Vec<(String, String)>> {
    let mut options = Vec::new();
    for part in text.split('&').filter(|part| !part.is_empty()) {
        let Some((key, value)) = part.split_once('=') else {
            let text = format!("option {part:?} has no value: write {part}=VALUE");
            return Err(Error::new(Kind::Usage, text));
        };
        options.push((percent_decode_value(key)?, percent_decode_value(value)?));
    }
    Ok(options)
}

fn share(text: &str) -> Result<f64> {
    let (above, below) = match (text.strip_suffix('%'), text.split_once([':', '/'])) {
        (Some(digits), _) => (digits, "100"),
        (None, Some(parts)) => parts,
        (None, None) => (text, "1"),
    };
    let number = |digits: &str| {
        let plain = digits.starts_with(|c: char| c.is_ascii_digit() || c == '.');
        digits.parse::<f64>().ok().filter(|_| plain)
    };
    match (number(above), number(below)) {
        // As nbdkit: 0 of 0 is 0.
        (Some(0.0), Some(0.0)) => Ok(0.0),
        (Some(above), Some(below)) if above <= below => Ok(above / below),
        _ => {
            let text = format!("{text:?} is not a share: give 0% to 100%, 0 to 1, or 1:1000");
            Err(Error::new(Kind::Usage, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMS: &[Param] = &[
        Param { name: "size", kind: ParamKind::Size, default: None, doc: "" },
        Param { name: "data", kind: ParamKind::Share, default: Some("30%"), doc: "" },
        Param { name: "direct", kind: ParamKind::Switch, default: None, doc: "" },
        Param { name: "mode", kind: ParamKind::Choice(&["a", "b"]), default: None, doc: "" },
    ];

    fn args(text: &str) -> Result<ParamValues> {
        ParamValues::check("thing", PARAMS, &parse_options(text)?)
    }

    #[test]
    fn values_are_checked_and_defaults_apply() {
        let args = args("size=1M&direct=on&mode=b").unwrap();
        assert_eq!(args.size("size"), Some(1 << 20));
        assert_eq!(args.share("data"), Some(0.3));
        assert!(args.switch("direct"));
        assert_eq!(args.text("mode"), Some("b"));
    }

    #[test]
    fn shares_and_switches_have_several_forms() {
        for text in ["25%", "0.25", ".25", "1:4", "1/4", "2.5e-1"] {
            assert_eq!(share(text).unwrap(), 0.25, "{text}");
        }
        assert_eq!((share("0:0").unwrap(), share("1").unwrap()), (0.0, 1.0));
        for text in
            ["", "%", "101%", "2", "-0.1", "+1", "nan", "inf", "1:0", "5:4", "1:", "1:2:3", "1%:2"]
        {
            assert!(share(text).is_err(), "{text}");
        }
        let on = ["on", "Yes", "y", "TRUE", "t", "1"].map(|text| parse_switch(text).unwrap());
        let off = ["off", "no", "N", "false", "f", "0"].map(|text| parse_switch(text).unwrap());
        assert_eq!((on, off), ([true; 6], [false; 6]));
        assert!(["", "2", "o", "ye"].iter().all(|text| parse_switch(text).is_err()));
    }

    #[test]
    fn others_are_kept_where_they_are_taken() {
        let typed = parse_options("a=1&size=1k&b=%26&a=2").unwrap();
        let args = ParamValues::check_known("thing", PARAMS, &typed).unwrap();
        let pair = |key: &str, value: &str| (key.to_string(), value.to_string());
        assert_eq!(args.others(), [pair("a", "1"), pair("b", "&"), pair("a", "2")]);
        assert_eq!(args.size("size"), Some(1024));
        let typed = parse_options("a=1&size=x").unwrap();
        assert!(ParamValues::check_known("thing", PARAMS, &typed).is_err());
    }

    #[test]
    fn errors_name_what_is_known() {
        let text = |typed: &str| args(typed).unwrap_err().to_string();
        assert_eq!(
            text("sise=1"),
            "thing: unknown option \"sise\"; known are size, data, direct, mode"
        );
        assert!(text("mode=c").contains("not one of a, b"));
        assert!(text("size=1&size=2").contains("given twice"));
        assert!(text("direct").contains("direct=VALUE"));
        assert!(text("data=130%").contains("0% to 100%"));
    }
}
