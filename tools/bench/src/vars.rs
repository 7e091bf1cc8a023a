//! Variables of scenarios: `{name}` in a text is replaced by a value.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use blockhaul_measure::{MeasureError, Result};

/// Variables by name.
pub type Vars = BTreeMap<String, VariableValue>;

/// Values may refer to values, this deep: more is a circle.
const DEPTH_MAX: u32 = 16;

/// The value of a variable.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(untagged)]
pub enum VariableValue {
    /// A whole number.
    Number(i64),
    /// A text, in which variables are replaced.
    Text(String),
    /// Words of a command, none or more.
    List(Vec<String>),
}

impl fmt::Display for VariableValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VariableValue::Number(number) => number.fmt(f),
            VariableValue::Text(text) => text.fmt(f),
            VariableValue::List(words) => words.join(" ").fmt(f),
        }
    }
}

impl<'de> Deserialize<'de> for VariableValue {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<VariableValue, D::Error> {
        struct VariableVisitor;
        impl<'de> Visitor<'de> for VariableVisitor {
            type Value = VariableValue;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, a whole number or a list of texts")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> std::result::Result<VariableValue, E> {
                Ok(VariableValue::Text(text.to_owned()))
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> std::result::Result<VariableValue, E> {
                Ok(VariableValue::Number(number))
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> std::result::Result<VariableValue, E> {
                i64::try_from(number)
                    .map(VariableValue::Number)
                    .map_err(|_| E::custom("the number is too large"))
            }
            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut words: A,
            ) -> std::result::Result<VariableValue, A::Error> {
                let mut all = Vec::new();
                while let Some(word) = words.next_element::<String>()? {
                    all.push(word);
                }
                Ok(VariableValue::List(all))
            }
        }
        from.deserialize_any(VariableVisitor)
    }
}

/// Variables in order of precedence: the first map with a name has its value.
#[derive(Clone, Debug, Default)]
pub struct VariableScope<'a> {
    maps: Vec<&'a Vars>,
}

impl<'a> VariableScope<'a> {
    /// A scope over maps, the strongest first.
    pub fn new(maps: impl IntoIterator<Item = &'a Vars>) -> VariableScope<'a> {
        VariableScope { maps: maps.into_iter().collect() }
    }

    /// A text with all its variables replaced. A list joins its words by blanks.
    pub fn text(&self, text: &str) -> Result<String> {
        self.text_at(text, 0)
    }

    /// Words of a command. A word that is nothing but a variable with a list becomes its words.
    pub fn words(&self, words: &[String]) -> Result<Vec<String>> {
        self.words_at(words, 0)
    }

    /// A size in bytes: a number, or a text with a unit (k, M, G, T; powers of 1024).
    pub fn size(&self, value: &VariableValue) -> Result<u64> {
        let text = self.text(&value.to_string())?;
        parse_size(&text).map_err(MeasureError::usage)
    }

    fn lookup(&self, name: &str) -> Result<&'a VariableValue> {
        self.maps.iter().find_map(|map| map.get(name)).ok_or_else(|| {
            let mut known: Vec<&str> =
                self.maps.iter().flat_map(|map| map.keys()).map(String::as_str).collect();
            known.sort_unstable();
            known.dedup();
            MeasureError::usage(format!(
                "there is no variable '{name}'; there are: {}; double braces stand for plain ones",
                known.join(", ")
            ))
        })
    }

    fn text_at(&self, text: &str, depth: u32) -> Result<String> {
        if depth > DEPTH_MAX {
            return Err(MeasureError::usage(format!(
                "variables refer to each other in a circle: '{text}'"
            )));
        }
        let mut out = String::new();
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            out.push_str(&rest[..at]);
            rest = &rest[at..];
            if rest.starts_with("{{") || rest.starts_with("}}") {
                out.push_str(&rest[..1]);
                rest = &rest[2..];
            } else if let Some(name) = variable(rest) {
                let value = match self.lookup(name)? {
                    VariableValue::Number(number) => number.to_string(),
                    VariableValue::Text(inner) => self.text_at(inner, depth + 1)?,
                    VariableValue::List(words) => self.words_at(words, depth + 1)?.join(" "),
                };
                out.push_str(&value);
                rest = &rest[name.len() + 2..];
            } else {
                out.push_str(&rest[..1]);
                rest = &rest[1..];
            }
        }
        out.push_str(rest);
        Ok(out)
    }

    fn words_at(&self, words: &[String], depth: u32) -> Result<Vec<String>> {
        if depth > DEPTH_MAX {
            return Err(MeasureError::usage(format!(
                "variables refer to each other in a circle: '{}'",
                words.join(" ")
            )));
        }
        let mut out = Vec::new();
        for word in words {
            let name = variable(word).filter(|name| name.len() + 2 == word.len());
            match name.map(|name| self.lookup(name)).transpose()? {
                Some(VariableValue::List(inner)) => {
                    out.append(&mut self.words_at(inner, depth + 1)?)
                }
                Some(VariableValue::Text(inner)) if variable(inner).is_some() => {
                    out.append(&mut self.words_at(std::slice::from_ref(inner), depth + 1)?);
                }
                _ => out.push(self.text_at(word, depth)?),
            }
        }
        Ok(out)
    }
}

/// The name, if a text starts with `{name}`.
fn variable(text: &str) -> Option<&str> {
    let name = text.strip_prefix('{')?.split_once('}')?.0;
    let good = !name.is_empty()
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
    good.then_some(name)
}

/// A number of bytes with an optional unit: `64k`, `1.5G` is not taken, `1536M` is.
pub fn parse_size(text: &str) -> std::result::Result<u64, String> {
    let wrong = || format!("'{text}' is no size; write for instance 4096, 64k, 350M or 6G");
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let shift = match unit {
        "" => 0,
        "k" | "K" => 10,
        "m" | "M" => 20,
        "g" | "G" => 30,
        "t" | "T" => 40,
        _ => return Err(wrong()),
    };
    number.checked_mul(1 << shift).filter(|size| i64::try_from(*size).is_ok()).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vars(pairs: &[(&str, VariableValue)]) -> Vars {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
    }

    fn text(text: &str) -> VariableValue {
        VariableValue::Text(text.to_owned())
    }

    fn strings(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn strong_maps_go_first_and_values_may_refer() {
        let strong = vars(&[("a", text("<{b}>")), ("n", VariableValue::Number(7))]);
        let weak = vars(&[("a", text("no")), ("b", text("{n}s"))]);
        let scope = VariableScope::new([&strong, &weak]);
        assert_eq!(scope.text("{a} {{b}} ${x y}{}").unwrap(), "<7s> {b} ${x y}{}");
    }

    #[test]
    fn lists_are_words_of_their_own() {
        let map = vars(&[
            ("flags", VariableValue::List(strings(&["-S", "{n}"]))),
            ("none", VariableValue::List(Vec::new())),
            ("same", text("{flags}")),
            ("n", VariableValue::Number(0)),
        ]);
        let scope = VariableScope::new([&map]);
        let words = strings(&["x", "{same}", "{none}", "y{n}"]);
        assert_eq!(scope.words(&words).unwrap(), ["x", "-S", "0", "y0"]);
    }

    #[test]
    fn unknown_names_and_circles_are_errors() {
        let map = vars(&[("a", text("{b}")), ("b", text("{a}"))]);
        let scope = VariableScope::new([&map]);
        assert!(scope.text("{a}").unwrap_err().to_string().contains("circle"));
        assert!(scope.words(&strings(&["{a}"])).unwrap_err().to_string().contains("circle"));
        let error = scope.text("{c}").unwrap_err().to_string();
        assert!(error.contains("no variable 'c'; there are: a, b"), "{error}");
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(parse_size("6G"), Ok(6 << 30));
        assert_eq!(parse_size("123"), Ok(123));
        for wrong in ["", "G", "1.5G", "-1", "99999999T", "9x"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }
}
