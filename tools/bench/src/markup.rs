//! Text and colours in HTML and SVG.

/// Colours of columns, light and dark; they repeat after the last.
pub(crate) const COLOURS: [(&str, &str); 8] = [
    ("#2a6fbb", "#5a9fe6"),
    ("#c8641b", "#f0924a"),
    ("#2c8a57", "#4fbf86"),
    ("#8a4fb0", "#b98adf"),
    ("#b8324f", "#ee7490"),
    ("#7a6a12", "#c9b23c"),
    ("#1d8a94", "#4cc2cc"),
    ("#6b6f76", "#a3a8b0"),
];

/// Text escaped for HTML, between tags and in attributes.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// The colour of a column.
pub(crate) fn colour(column: usize) -> String {
    format!("var(--c{})", column % COLOURS.len())
}
