//! Translates parameters of nbdkit's plugins to options of the equivalent devices.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::time::SystemTime;

use blockhaul_catalog::DeviceSpec;

use super::line::{PluginParameter, escaped};

/// The device for a plugin with these parameters; `None`: the plugin is needed.
pub fn device(plugin: &str, parameters: &[PluginParameter]) -> Option<String> {
    match plugin {
        "partitioning" => partitioning(parameters),
        "sparse-random" => sparse_random(parameters),
        "info" => info(parameters),
        _ => None,
    }
}

/// The device with data that is given as one of `data=`, `raw=` and `base64=`.
pub fn data(parameters: &[PluginParameter]) -> Option<String> {
    let mut options = Vec::new();
    let mut given = 0;
    let mut size = None;
    for (key, value) in parameters {
        match key.as_deref().unwrap_or("data") {
            "allocator" if value == "sparse" => {}
            // Like the plugin: the last one counts.
            "size" => size = Some(value),
            key @ ("data" | "raw" | "base64") => {
                given += 1;
                options.push((key.to_string(), value));
            }
            // Variables, and other allocators.
            _ => return None,
        }
    }
    options.extend(size.map(|size| ("size".to_string(), size)));
    (given == 1).then(|| spelled("data:", &options))
}

/// Files; a setting applies to all files after it.
fn partitioning(parameters: &[PluginParameter]) -> Option<String> {
    let mut lists = ["alignment", "mbr-id", "type-guid"].map(|key| (key, Vec::new()));
    let mut now = ["1M", "default", "default"].map(String::from);
    let mut files = Vec::new();
    let mut kind = None;
    for (key, value) in parameters {
        match key.as_deref().unwrap_or("file") {
            "file" => {
                files.push(value);
                lists.iter_mut().zip(&now).for_each(|((_, list), now)| list.push(now.clone()));
            }
            "partition-type" => kind = Some(value.to_ascii_lowercase()),
            key => {
                let index = lists.iter().position(|(name, _)| *name == key)?;
                now[index].clone_from(value);
            }
        }
    }
    if files.is_empty() {
        return None;
    }
    let files: Vec<_> = files.into_iter().map(|file| literal(file)).collect();
    let mut options: Vec<_> = files.iter().map(|file| ("file".to_string(), file)).collect();
    options.extend(kind.as_ref().map(|kind| ("partition-type".to_string(), kind)));
    let lists = lists.map(|(key, list)| (key.to_string(), list.join(",")));
    options.extend(lists.iter().map(|(key, list)| (key.clone(), list)));
    Some(spelled("partitioning:", &options))
}

/// A path that cannot be mistaken for a description of another device.
fn literal(path: &str) -> String {
    let is_path = matches!(DeviceSpec::parse(OsStr::new(path)), Ok(DeviceSpec::Path(_)));
    if is_path { path.to_string() } else { format!("./{path}") }
}

/// Options by name, the last of each; a bare one is `magic`.
fn last<'a>(parameters: &'a [PluginParameter], magic: &'a str) -> BTreeMap<&'a str, String> {
    let pairs = parameters.iter();
    pairs.map(|(key, value)| (key.as_deref().unwrap_or(magic), value.clone())).collect()
}

/// A device with the options that are in the map.
fn with(device: &str, options: &BTreeMap<&str, String>) -> String {
    let options: Vec<_> = options.iter().map(|(key, value)| (key.to_string(), value)).collect();
    spelled(device, &options)
}

/// A size and numbers; without a seed the disk differs each time, as with the plugin.
fn sparse_random(parameters: &[PluginParameter]) -> Option<String> {
    let mut options = last(parameters, "size");
    let size = options.remove("size")?;
    blockhaul_catalog::parse_size(&size).ok()?;
    // A number there, a size here.
    if let Some(runlength) = options.get_mut("runlength") {
        *runlength = blockhaul_catalog::parse_number::<u64>(runlength).ok()?.to_string();
    }
    let known = ["seed", "percent", "runlength", "random-content"];
    if options.keys().any(|key| !known.contains(key)) {
        return None;
    }
    options.entry("seed").or_insert_with(|| {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        (now.as_secs() & 0xffff_ffff).to_string()
    });
    Some(with(&format!("sparse-random:{size}"), &options))
}

fn info(parameters: &[PluginParameter]) -> Option<String> {
    let mut options = last(parameters, "mode");
    let mode = options.remove("mode").unwrap_or_default();
    if mode.eq_ignore_ascii_case("version") {
        return options.is_empty().then(|| format!("data:?raw={}", super::own::VERSION));
    }
    options.is_empty().then(|| format!("info:{}", escaped(&mode)))
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

    fn word(plugin: &str, words: &[&str]) -> Option<String> {
        let parameters = words.iter().map(|word| super::super::line::parameter(word));
        device(plugin, &parameters.collect::<Vec<_>>())
    }

    #[test]
    fn data_is_given_in_one_way() {
        let word = |words: &[&str]| {
            data(&words.iter().map(|word| super::super::line::parameter(word)).collect::<Vec<_>>())
        };
        assert_eq!(word(&["1 2"]).unwrap(), "data:?data=1%202");
        let words = ["1?", "size=1M", "allocator=sparse", "size=2M"];
        assert_eq!(word(&words).unwrap(), "data:?data=1%3f&size=2M");
        assert_eq!(word(&["raw="]).unwrap(), "data:?raw=");
        assert_eq!(word(&["size=1M"]), None);
        assert_eq!(word(&["1", "raw=1"]), None);
        assert_eq!(word(&["1", "allocator=zstd"]), None);
        assert_eq!(word(&["a=1", "$a"]), None);
    }

    #[test]
    fn partitions_have_what_was_said_before_them() {
        let words = ["file=memory:1M", "-"];
        let found = word("partitioning", &words).unwrap();
        assert!(found.starts_with("partitioning:?file=./memory:1M&file=./-&"), "{found}");
        let words = ["mbr-id=0x82", "a", "alignment=512", "file=b,c", "mbr-id=default", "d"];
        assert_eq!(
            word("partitioning", &words).unwrap(),
            "partitioning:?file=a&file=b%2cc&file=d&alignment=1M%2c512%2c512\
             &mbr-id=0x82%2c0x82%2cdefault&type-guid=default%2cdefault%2cdefault"
        );
        assert_eq!(word("partitioning", &["partition-type=gpt"]), None);
        assert_eq!(word("partitioning", &["a", "x=y"]), None);
    }

    #[test]
    fn sparse_disks_have_their_seed() {
        let words = ["1M", "seed=5", "percent=20"];
        assert_eq!(word("sparse-random", &words).unwrap(), "sparse-random:1M?percent=20&seed=5");
        assert!(word("sparse-random", &["1M", "runlength=0x1000"]).unwrap().contains("=4096"));
        assert_eq!(word("sparse-random", &["1M", "runlength=1M"]), None);
        assert!(word("sparse-random", &["size=1M"]).unwrap().contains("?seed="));
        assert_eq!(word("sparse-random", &["seed=5"]), None);
    }

    #[test]
    fn info_has_a_mode() {
        assert_eq!(word("info", &[]).unwrap(), "info:");
        assert_eq!(word("info", &["mode=time"]).unwrap(), "info:time");
        assert_eq!(word("info", &["x=y"]), None);
        assert_eq!(
            word("info", &["version"]).unwrap(),
            format!("data:?raw={}", super::super::own::VERSION)
        );
    }
}
