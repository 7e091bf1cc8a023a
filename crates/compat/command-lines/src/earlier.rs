//! Options of blockhaul with their earlier names, where another option has the name now.

use std::ffi::OsString;

/// The values of `map --output`.
pub const MAP_OUTPUTS: [&str; 4] = ["nbdinfo", "json", "json-lines", "qemu"];

/// The words of a command line of blockhaul, with today's names of its options: `map --format` with one of
/// [`MAP_OUTPUTS`] is `--output`, because `--format` is that of the file in all commands.
pub fn renamed(mut words: Vec<OsString>) -> Vec<OsString> {
    if words.get(1).is_none_or(|command| command != "map") {
        return words;
    }
    for at in 2..words.len() {
        let next = words.get(at + 1).and_then(|next| next.to_str());
        let Some(word) = words[at].to_str() else { continue };
        let value = word.strip_prefix("--format=").filter(|value| MAP_OUTPUTS.contains(value));
        if word == "--format" && next.is_some_and(|next| MAP_OUTPUTS.contains(&next)) {
            words[at] = "--output".into();
        } else if let Some(value) = value {
            words[at] = format!("--output={value}").into();
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_output_of_map_is_renamed() {
        for (line, expected) in [
            ("blockhaul map --format qemu a", "blockhaul map --output qemu a"),
            ("blockhaul map a --format=json-lines", "blockhaul map a --output=json-lines"),
            ("blockhaul map --format qcow2 a", "blockhaul map --format qcow2 a"),
            ("blockhaul copy --format qemu a b", "blockhaul copy --format qemu a b"),
            ("blockhaul map --format", "blockhaul map --format"),
            ("blockhaul", "blockhaul"),
        ] {
            let words = renamed(line.split(' ').map(OsString::from).collect());
            assert_eq!(words.join(" ".as_ref()), expected);
        }
    }
}
