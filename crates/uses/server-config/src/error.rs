//! Errors of a configuration file, as data.

use std::fmt;
use std::path::Path;

/// The kinds of faults of a configuration file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfigErrorKind {
    /// The file cannot be read.
    File,
    /// The text of the file is invalid.
    Text,
    /// A running server cannot make the change.
    Change,
    /// The device of an export cannot be opened.
    Device,
}

/// A fault of a configuration file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigFileError {
    /// The kind of the fault.
    pub kind: ConfigErrorKind,
    /// The file, as the user names it, for messages.
    pub path: String,
    /// The line of the fault, from 1; 0: the fault is about the whole file.
    pub line: usize,
    /// The key or the table, if the fault is about one.
    pub key: Option<String>,
    /// The fault, and a remedy where there is one.
    pub text: String,
    /// The known word that is most similar to an unknown one.
    pub guess: Option<String>,
}

impl ConfigFileError {
    /// An error of this kind on a line, from 1; 0: about the whole file.
    pub fn new(
        kind: ConfigErrorKind,
        path: impl AsRef<Path>,
        line: usize,
        text: impl Into<String>,
    ) -> ConfigFileError {
        let text = text.into();
        let path = path.as_ref().display().to_string();
        ConfigFileError { kind, path, line, key: None, text, guess: None }
    }

    /// This error with the key or table that it is about.
    #[must_use]
    pub fn about(self, key: impl Into<String>) -> ConfigFileError {
        ConfigFileError { key: Some(key.into()), ..self }
    }

    /// This error with the similar one of these words, if there is one.
    #[must_use]
    pub fn guessing<'a>(self, word: &str, known: impl Iterator<Item = &'a str>) -> ConfigFileError {
        let guess = blockhaul_catalog::nearest(word, known).map(str::to_string);
        ConfigFileError { guess, ..self }
    }
}

impl fmt::Display for ConfigFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.path)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        f.write_str(": ")?;
        if let Some(key) = &self.key {
            write!(f, "key {key}: ")?;
        }
        f.write_str(&self.text)?;
        match &self.guess {
            Some(guess) => write!(f, "; did you mean {guess}?"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for ConfigFileError {}
