//! Parameters of nbdkit's plugins as options of the devices that stand in for them.

use super::line::{Parameter, escaped};

/// The device for a plugin with these parameters; `None`: the plugin is needed.
pub fn device(plugin: &str, parameters: &[Parameter]) -> Option<String> {
    match plugin {
        "data" => data(parameters),
        _ => None,
    }
}

/// What it is given as one of `data=`, `raw=` and `base64=`, and variables.
fn data(parameters: &[Parameter]) -> Option<String> {
    let mut options = Vec::new();
    let mut given = 0;
    let mut size = None;
    for (key, value) in parameters {
        match key.as_deref().unwrap_or("data") {
            "allocator" if value == "sparse" => {}
            // The others differ in the memory that they take, and in what they tell of it.
            "allocator" => return None,
            // As the plugin: the last one counts.
            "size" => size = Some(value),
            key => {
                given += usize::from(["data", "raw", "base64"].contains(&key));
                options.push((key.to_string(), value));
            }
        }
    }
    options.extend(size.map(|size| ("size".to_string(), size)));
    // What is wrong is the plugin's to say.
    (given == 1).then(|| spelled("data:", &options))
}

/// A device with its options.
fn spelled(device: &str, options: &[(String, &String)]) -> String {
    let options = options.iter().map(|(key, value)| format!("{key}={}", escaped(value)));
    let options = options.collect::<Vec<_>>().join("&");
    format!("{device}?{options}").trim_end_matches('?').to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(plugin: &str, words: &[&str]) -> Option<String> {
        let parameters = words.iter().map(|word| super::super::line::parameter(word));
        device(plugin, &parameters.collect::<Vec<_>>())
    }

    #[test]
    fn data_is_given_in_one_way() {
        assert_eq!(made("data", &["1 2"]).unwrap(), "data:?data=1%202");
        let words = ["a=1", "$a?", "size=1M", "allocator=sparse", "size=2M"];
        assert_eq!(made("data", &words).unwrap(), "data:?a=1&data=%24a%3f&size=2M");
        assert_eq!(made("data", &["raw="]).unwrap(), "data:?raw=");
        assert_eq!(made("data", &["size=1M"]), None);
        assert_eq!(made("data", &["1", "raw=1"]), None);
        assert_eq!(made("data", &["1", "allocator=zstd"]), None);
    }
}
