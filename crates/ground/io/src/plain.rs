//! System error texts for users.

use std::fmt::Display;

/// An error without "(os error N)", which adds nothing to the text.
pub fn plain(error: &(impl Display + ?Sized)) -> String {
    let mut text = error.to_string();
    if let Some(at) = text.find(" (os error ") {
        text.truncate(at);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_left_out() {
        let error = std::io::Error::from_raw_os_error(2);
        assert_eq!(plain(&error), "No such file or directory");
        assert_eq!(plain("no number"), "no number");
    }
}
