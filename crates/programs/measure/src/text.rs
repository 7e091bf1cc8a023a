//! Numbers and commands as text.

/// A number with three digits that matter.
pub fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 99.95 => format!("{value:.0}"),
        v if v >= 9.995 => format!("{value:.1}"),
        v if v >= 0.9995 => format!("{value:.2}"),
        v if v >= 0.01 || v == 0.0 => format!("{value:.3}"),
        _ => format!("{value:.5}"),
    }
}

/// Words as a line that a shell would take, for people to repeat.
pub fn shell_line(words: &[String]) -> String {
    if let [shell, option, line] = words
        && (shell == "/bin/sh" && option == "-c")
    {
        return line.clone();
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=+./:,@%?{}".contains(c);
    let quoted = |word: &String| {
        if !word.is_empty() && word.chars().all(plain) {
            word.clone()
        } else {
            format!("'{}'", word.replace('\'', "'\\''"))
        }
    };
    words.iter().map(quoted).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_that_matter() {
        let cases = [(123.4, "123"), (12.34, "12.3"), (9.999, "10.0"), (0.59381, "0.594")];
        for (value, expected) in cases.into_iter().chain([(0.00123, "0.00123"), (0.0, "0.000")]) {
            assert_eq!(number(value), expected);
        }
    }
}
