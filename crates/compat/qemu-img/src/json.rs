//! Values in the order and with the indentation of QEMU's programs, as JSON and as text.

use blockhaul_transfer::one_line;
/// A value.
#[derive(Debug, Clone)]
pub enum JsonValue {
    Text(String),
    Number(u64),
    Flag(bool),
    List(Vec<JsonValue>),
    /// Members in their order.
    Object(Vec<(&'static str, JsonValue)>),
}

impl JsonValue {
    /// As JSON, with an indentation of 4 blanks.
    pub fn json(&self) -> String {
        let mut text = String::new();
        self.append(&mut text, 0);
        text
    }

    fn append(&self, text: &mut String, depth: usize) {
        let line = |text: &mut String, depth: usize| {
            text.push('\n');
            text.push_str(&"    ".repeat(depth));
        };
        match self {
            JsonValue::Text(value) => text.push_str(&quoted(value)),
            JsonValue::Number(value) => text.push_str(&value.to_string()),
            JsonValue::Flag(value) => text.push_str(if *value { "true" } else { "false" }),
            JsonValue::List(values) => {
                text.push('[');
                for (index, value) in values.iter().enumerate() {
                    text.push_str(if index > 0 { "," } else { "" });
                    line(text, depth + 1);
                    value.append(text, depth + 1);
                }
                line(text, depth);
                text.push(']');
            }
            JsonValue::Object(members) => {
                text.push('{');
                for (index, (name, value)) in members.iter().enumerate() {
                    text.push_str(if index > 0 { "," } else { "" });
                    line(text, depth + 1);
                    text.push_str(&format!("\"{name}\": "));
                    value.append(text, depth + 1);
                }
                line(text, depth);
                text.push('}');
            }
        }
    }

    /// As lines for people, at this depth.
    pub fn lines(&self, depth: usize) -> String {
        let blank = "    ".repeat(depth);
        let one = |name: String, value: &JsonValue| match value {
            JsonValue::List(_) | JsonValue::Object(_) => {
                format!("{blank}{name}:\n{}", value.lines(depth + 1))
            }
            JsonValue::Text(value) => format!("{blank}{name}: {}\n", one_line(value)),
            JsonValue::Number(value) => format!("{blank}{name}: {value}\n"),
            JsonValue::Flag(value) => format!("{blank}{name}: {value}\n"),
        };
        match self {
            JsonValue::Object(members) => {
                members.iter().map(|(name, value)| one(name.replace('-', " "), value)).collect()
            }
            JsonValue::List(values) => {
                let values = values.iter().enumerate();
                values.map(|(index, value)| one(format!("[{index}]"), value)).collect()
            }
            _ => String::new(),
        }
    }
}

/// A string of JSON in ASCII, as QEMU writes it.
fn quoted(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    let mut ascii = String::new();
    for letter in quoted.chars() {
        if letter.is_ascii() {
            ascii.push(letter);
        } else {
            let mut units = [0; 2];
            for unit in letter.encode_utf16(&mut units) {
                ascii.push_str(&format!("\\u{unit:04X}"));
            }
        }
    }
    ascii
}

#[cfg(test)]
mod tests {
    use super::JsonValue::{Flag, List, Number, Object, Text};

    #[test]
    fn members_keep_their_order() {
        let value = Object(vec![
            ("b-c", Text("x\"\u{e4}".to_string())),
            ("a", List(vec![Object(vec![("n", Number(1))]), Flag(true)])),
            ("e", List(Vec::new())),
        ]);
        let json = "{\n    \"b-c\": \"x\\\"\\u00E4\",\n    \"a\": [\n        {\n            \"n\": 1\n        },\n        \
                    true\n    ],\n    \"e\": [\n    ]\n}";
        assert_eq!(value.json(), json);
        let lines = "b c: x\"\u{e4}\na:\n    [0]:\n        n: 1\n    [1]: true\ne:\n";
        assert_eq!(value.lines(0), lines);
    }
}
