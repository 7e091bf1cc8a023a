//! One table of a file in TOML: its keys, and their values with line and guess in errors.

use std::borrow::Cow;
use std::fmt::Display;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::error::{ConfigErrorKind, ConfigFileError};

/// The text of a file in TOML, for lines in errors.
#[derive(Debug, Clone, Copy)]
pub struct TomlText<'a> {
    /// The file, as the user names it.
    pub path: &'a str,
    /// The text.
    pub text: &'a str,
}

impl TomlText<'_> {
    /// The line of the byte at this offset, from 1.
    pub fn line(&self, offset: usize) -> usize {
        let before = &self.text.as_bytes()[..offset.min(self.text.len())];
        1 + before.iter().filter(|&&byte| byte == b'\n').count()
    }

    /// A fault at this offset that is not about a key.
    pub fn fault(&self, offset: usize, text: impl Display) -> ConfigFileError {
        let line = self.line(offset);
        ConfigFileError::new(ConfigErrorKind::Text, self.path, line, text.to_string())
    }
}

/// A key and its value, with their places in the text.
pub type TomlEntry<'a, 'i> = (&'a Spanned<Cow<'i, str>>, &'a Spanned<DeValue<'i>>);

/// The entry of this name in a table.
pub fn toml_entry<'a, 'i>(table: &'a DeTable<'i>, name: &str) -> Option<TomlEntry<'a, 'i>> {
    table.iter().find(|(key, _)| key.get_ref().as_ref() == name)
}

/// The offset at which a table begins, which is that of its first key; `None`: it is empty.
pub fn toml_start(table: &DeTable<'_>) -> Option<usize> {
    table.iter().map(|(key, _)| key.span().start).min()
}

/// A string or a number as text; `None`: another value.
pub fn toml_word(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) => {
            let number = i64::from_str_radix(number.as_str(), number.radix()).ok()?;
            Some(number.to_string())
        }
        DeValue::Float(number) => Some(number.as_str().to_string()),
        _ => None,
    }
}

/// A table of the file.
#[derive(Clone, Copy)]
pub(crate) struct ConfigTable<'a> {
    pub(crate) file: TomlText<'a>,
    pub(crate) table: &'a DeTable<'a>,
    /// The offset at which the table begins.
    pub(crate) offset: usize,
}

impl<'a> ConfigTable<'a> {
    /// The first line of the table, from 1.
    pub(crate) fn line(&self) -> usize {
        self.file.line(self.offset)
    }

    /// Refuses keys that are not among the known ones.
    pub(crate) fn check_keys(&self, known: &[&str]) -> Result<(), ConfigFileError> {
        for (key, _) in self.table {
            let name = key.get_ref().as_ref();
            if !known.contains(&name) {
                let text = format!("unknown key; known are {}", known.join(", "));
                let fault = self.file.fault(key.span().start, text).about(name);
                return Err(fault.guessing(name, known.iter().copied()));
            }
        }
        Ok(())
    }

    /// A fault of a key, or of the table if the key is absent.
    pub(crate) fn fault(&self, name: &str, text: impl Display) -> ConfigFileError {
        self.file.fault(self.offset_of(name), text).about(name)
    }

    /// The offset of a key; that of the table if the key is absent.
    pub(crate) fn offset_of(&self, name: &str) -> usize {
        self.entry(name).map_or(self.offset, |(key, _)| key.span().start)
    }

    /// The line of a key, from 1; 0 if the key is absent.
    pub(crate) fn key_line(&self, name: &str) -> usize {
        self.entry(name).map_or(0, |(key, _)| self.file.line(key.span().start))
    }

    fn entry(&self, name: &str) -> Option<TomlEntry<'a, 'a>> {
        toml_entry(self.table, name)
    }

    /// The value of a key.
    pub(crate) fn value(&self, name: &str) -> Option<&'a DeValue<'a>> {
        self.entry(name).map(|(_, value)| value.get_ref())
    }

    /// A string.
    pub(crate) fn string(&self, name: &str) -> Result<Option<&'a str>, ConfigFileError> {
        match self.value(name) {
            None => Ok(None),
            Some(DeValue::String(text)) => Ok(Some(text.as_ref())),
            Some(_) => Err(self.fault(name, "must be a string")),
        }
    }

    /// `true` or `false`.
    pub(crate) fn switch(&self, name: &str) -> Result<Option<bool>, ConfigFileError> {
        match self.value(name) {
            None => Ok(None),
            Some(DeValue::Boolean(on)) => Ok(Some(*on)),
            Some(_) => Err(self.fault(name, "must be true or false")),
        }
    }

    /// A string or a number, as text.
    pub(crate) fn word(&self, name: &str) -> Result<Option<String>, ConfigFileError> {
        let wrong = || self.fault(name, "must be a string or a number");
        self.value(name).map(|value| toml_word(value).ok_or_else(wrong)).transpose()
    }

    /// A list of strings and numbers, or one of them, as texts.
    pub(crate) fn words(&self, name: &str) -> Result<Option<Vec<String>>, ConfigFileError> {
        let words = match self.value(name) {
            None => return Ok(None),
            Some(DeValue::Array(list)) => {
                list.iter().map(|value| toml_word(value.get_ref())).collect()
            }
            Some(value) => toml_word(value).map(|word| vec![word]),
        };
        let wrong = || self.fault(name, "must be a string, or a list of strings");
        words.ok_or_else(wrong).map(Some)
    }

    /// A value that `parse` makes of a string or a number.
    pub(crate) fn parsed<T, E: Display>(
        &self,
        name: &str,
        parse: impl Fn(&str) -> Result<T, E>,
    ) -> Result<Option<T>, ConfigFileError> {
        let word = self.word(name)?;
        word.map(|word| parse(&word).map_err(|error| self.fault(name, error))).transpose()
    }
}
