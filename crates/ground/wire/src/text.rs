//! Texts of peers: made printable, and within the protocol's limits.

use crate::limits;

/// Whether a terminal may not show `c` literally: control characters (C0, C1, DEL), and marks that
/// change the writing direction.
pub fn unprintable(c: char) -> bool {
    let turns = matches!(
        c,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    );
    c.is_control() || turns
}

/// A peer's text made printable: at most `max` bytes, with control characters and invalid UTF-8
/// escaped. A cut is marked by `...`.
pub fn printable(text: &[u8], max: usize) -> String {
    let mut out = String::new();
    // Escapes only lengthen the text, so more than `max` bytes of it are never shown. A character
    // takes at most four bytes; the slack keeps the cut from splitting the last one.
    let seen = &text[..text.len().min(max.saturating_add(4))];
    for chunk in seen.utf8_chunks() {
        for c in chunk.valid().chars() {
            let start = out.len();
            if unprintable(c) || c == '\\' || c == '"' {
                out.extend(c.escape_default());
            } else {
                out.push(c);
            }
            if out.len() > max {
                out.truncate(start);
                out.push_str("...");
                return out;
            }
        }
        for byte in chunk.invalid() {
            if out.len() + 4 > max {
                out.push_str("...");
                return out;
            }
            out.push_str(&format!("\\x{byte:02x}"));
        }
    }
    if seen.len() < text.len() {
        out.push_str("...");
    }
    out
}

/// A peer's error text for printing, limited by [`limits::ERROR_TEXT`].
pub(crate) fn error_text(text: &[u8]) -> String {
    printable(text, limits::ERROR_TEXT)
}

/// The text cut to the protocol's maximum for strings, not inside a character.
pub(crate) fn cut(text: &[u8]) -> &[u8] {
    if text.len() <= limits::STRING {
        return text;
    }
    let mut end = limits::STRING;
    while end > limits::STRING - 4 && text[end] & 0xc0 == 0x80 {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_drive_a_terminal() {
        assert_eq!(printable(b"\x1b[2Jhi\n\xff\"", 100), "\\u{1b}[2Jhi\\n\\xff\\\"");
        assert_eq!(printable("a\u{202e}b\u{9b}é".as_bytes(), 100), "a\\u{202e}b\\u{9b}é");
    }

    #[test]
    fn text_is_cut_between_characters() {
        assert_eq!(printable("ééé".as_bytes(), 5), "éé...");
        assert_eq!(printable("ééé".as_bytes(), 6), "ééé");
        assert_eq!(printable(&[b'a'; 100], 10), "aaaaaaaaaa...");
        assert_eq!(printable(&[0xff; 100], 9), "\\xff\\xff...");
        for max in 0..40 {
            let shown = printable("\u{1b}é\u{10348}\\\"aé\u{10348}".as_bytes(), max);
            assert!(shown.len() <= max + 3, "{max}: {shown}");
        }
    }
}
