//! Faults of TOML files in the words of users.

/// The fault at `offset` of a TOML file: the message of the parser, unless the line there has a text without quotes as
/// its value.
pub fn toml_fault(text: &str, offset: usize, message: &str) -> String {
    match unquoted(text, offset) {
        Some((key, word)) => {
            format!("{key}: {word} is not a number, true or false; a text needs quotes: \"{word}\"")
        }
        None => message.to_string(),
    }
}

/// The key and the value of the line at this offset, if the value is a text without quotes.
fn unquoted(text: &str, offset: usize) -> Option<(&str, &str)> {
    let begin = text.get(..offset)?.rfind('\n').map_or(0, |at| at + 1);
    let (key, value) = text.get(begin..)?.lines().next()?.split_once('=')?;
    let word = value.split('#').next()?.trim();
    let is_text = word.starts_with(|first: char| first.is_alphanumeric() || "/.~".contains(first))
        && !word.contains(['"', '\'', '\\'])
        && word.parse::<f64>().is_err()
        && !["true", "false"].contains(&word);
    is_text.then_some((key.trim(), word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_without_quotes_is_named() {
        let parser = "expected a value";
        for (line, word) in [
            ("parallel = two", "two"),
            ("rate = 40M # at night", "40M"),
            ("verify = yes", "yes"),
            ("target = /dev/sda", "/dev/sda"),
        ] {
            let text = format!("a = 1\n{line}\nb = 2\n");
            let key = line.split(' ').next().unwrap_or_default();
            let expected = format!(
                "{key}: {word} is not a number, true or false; a text needs quotes: \"{word}\""
            );
            for offset in [6, 6 + line.find('=').unwrap_or_default()] {
                assert_eq!(toml_fault(&text, offset, parser), expected, "{text}");
            }
        }
        for line in ["a = \"x", "a = [1,", "a", "a = true", "a = 1.5", "", "a = 'x"] {
            for offset in [0, line.len(), 1 << 20] {
                assert_eq!(toml_fault(line, offset, parser), parser, "{line}");
            }
        }
        assert_eq!(toml_fault("\u{20ac} = x", 1, parser), parser, "within a letter");
    }
}
