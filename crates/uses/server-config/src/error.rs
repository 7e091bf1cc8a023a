//! Errors of a configuration file, as data.

use std::fmt;

/// A fault of a configuration file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigFileError {
    /// The file, as the user names it.
    pub path: String,
    /// The line of the fault, from 1.
    pub line: usize,
    /// The key, if the fault is about one.
    pub key: Option<String>,
    /// The fault, and a remedy where there is one.
    pub text: String,
    /// The known word that is most similar to an unknown one.
    pub guess: Option<String>,
}

impl fmt::Display for ConfigFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: ", self.path, self.line)?;
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
