//! Text from outside in messages.

/// Text from outside in one line: names, paths, arguments, messages and fields of headers must not
/// look like separate lines, or control a terminal. Control characters except tabs, and marks that
/// change the writing direction, are escaped as in Rust; trailing newlines are removed.
pub fn one_line(text: &str) -> String {
    one_word(text.trim_end_matches('\n'))
}

/// Text from outside as a part of a line: like [`one_line`], with trailing newlines escaped.
pub fn one_word(text: &str) -> String {
    escaped(text, |character| character == '\t')
}

/// Text of several lines, each like [`one_line`].
pub fn lines(text: &str) -> String {
    escaped(text, |character| matches!(character, '\t' | '\n'))
}

fn escaped(text: &str, stays: impl Fn(char) -> bool) -> String {
    let mut line = String::with_capacity(text.len());
    for character in text.chars() {
        if blockhaul_wire::unprintable(character) && !stays(character) {
            line.extend(character.escape_default());
        } else {
            line.push(character);
        }
    }
    line
}

/// A word quoted for a shell.
pub fn shell_word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,%@+".contains(c);
    if !word.is_empty() && word.chars().all(plain) || word == "[" || word == "]" {
        word.to_string()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_have_said_stays_on_its_line() {
        let text = "a\nb\tc\u{1b}[31m\u{9b}é\u{202e}\u{61c}\n";
        assert_eq!(one_line(text), "a\\nb\tc\\u{1b}[31m\\u{9b}é\\u{202e}\\u{61c}");
        assert_eq!(lines(text), "a\nb\tc\\u{1b}[31m\\u{9b}é\\u{202e}\\u{61c}\n");
    }

    #[test]
    fn words_of_a_command_line_are_quoted_where_a_shell_would_change_them() {
        for (word, quoted) in
            [("nbd://h/x", "nbd://h/x"), ("it's", "'it'\\''s'"), ("", "''"), ("a?b&c", "'a?b&c'")]
        {
            assert_eq!(shell_word(word), quoted, "{word}");
        }
    }
}
