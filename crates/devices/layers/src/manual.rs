//! Manual pages of layers, generated from their declarations.

use std::fmt::Write as _;

use blockhaul_catalog::AnyKind;

/// The page of a layer or a gate, in Markdown; stored in `docs/layers`.
pub fn page(layer: AnyKind) -> String {
    let name = layer.name();
    let mut text = format!("# Layer `{name}`\n\nThe layer {}.\n\n", layer.summary());
    let example: Vec<_> = layer.params().iter().take(1).map(|param| param.name).collect();
    let options = match example.first() {
        Some(param) => format!("[?{param}=…]"),
        None => String::new(),
    };
    // Writing to a string does not fail.
    let _ = writeln!(text, "    blockhaul serve --layer '{name}{options}' DEVICE\n");
    for paragraph in layer.manual().split("\n\n").filter(|paragraph| !paragraph.is_empty()) {
        let _ = writeln!(text, "{}\n", wrapped(paragraph));
    }
    let _ = writeln!(text, "```sh\n{}\n```\n", layer.example().trim());
    if layer.params().is_empty() {
        text += "It has no options.\n";
        return text;
    }
    text += "| option | values | default | |\n|---|---|---|---|\n";
    for param in layer.params() {
        let default = param.default.map(|value| value.trim_end().replace('|', "\\|"));
        let default = match default.as_deref() {
            None => "none".to_string(),
            Some("") => "empty".to_string(),
            Some(value) => format!("`{value}`"),
        };
        let values = param.kind.placeholder().replace('|', "\\|");
        let _ = writeln!(text, "| `{}` | {values} | {default} | {} |", param.name, param.doc);
    }
    let changeable: Vec<_> = layer.changeable().iter().map(|param| format!("`{param}`")).collect();
    if !changeable.is_empty() {
        let line = format!(
            "On a running server, `blockhaul ctl SOCKET set EXPORT {name} OPTION=VALUE` changes {}.",
            changeable.join(", ")
        );
        let _ = writeln!(text, "\n{}", wrapped(&line));
    }
    text
}

/// The list of all pages.
pub fn index(layers: &[AnyKind]) -> String {
    let mut text = String::from(
        "# Layers\n\nA layer changes a device: `--layer NAME?option=value&…`, repeated; the first is next to \
         the device,\nthe last next to the client. `blockhaul help layers` lists all options. The \
         example of each page\nworks unchanged in an empty directory.\n\n| layer | |\n|---|---|\n",
    );
    for layer in layers {
        let name = layer.name();
        let _ = writeln!(text, "| [{name}]({name}.md) | {} |", layer.summary());
    }
    text
}

/// A paragraph in lines of at most 100 characters.
fn wrapped(paragraph: &str) -> String {
    let mut text = String::new();
    let mut column = 0;
    for word in paragraph.split_whitespace() {
        let len = word.chars().count();
        if column > 0 && column + 1 + len > 100 {
            text.push('\n');
            column = 0;
        } else if column > 0 {
            text.push(' ');
            column += 1;
        }
        text += word;
        column += len;
    }
    text
}
