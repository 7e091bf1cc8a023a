//! Maps nbdkit's plugins to backends. If there is no backend for a plugin or its parameters, the
//! plugin itself is hosted.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::FileTypeExt as _;
use std::path::PathBuf;

use super::line::{NbdkitCommand, PluginParameter, escaped};
use super::natives;

/// Maximum number of files of a split disk.
const SPLIT_MAX: usize = 512;

/// Our own device for a plugin's name and parameters; `None`: the plugin is needed.
pub fn native(line: &NbdkitCommand) -> Option<OsString> {
    let name = line.plugin.as_deref()?;
    let parameters = &line.parameters;
    match name {
        // Its default size is 0.
        "null" => Some(format!("null:{}", size(parameters, "0")?).into()),
        "memory" => Some(format!("memory:{}", size(parameters, "")?).into()),
        "full" => Some(format!("full:{}", size(parameters, "")?).into()),
        // The plugins accept writes, which they compare or discard.
        "pattern" if line.readonly => Some(format!("pattern:{}", size(parameters, "")?).into()),
        "ones" if line.readonly => Some(format!("ones:{}", size(parameters, "")?).into()),
        "file" => file(line),
        "split" => split(line),
        _ => natives::device(name, parameters).map(OsString::from),
    }
}

/// Our own device for a plugin that is not installed, where the plugin would be preferred: it reports
/// parameters that it does not support, and files that it cannot open.
pub fn substitute(line: &NbdkitCommand) -> Option<OsString> {
    let parameters = &line.parameters;
    let script = |key: &Option<String>| key.as_deref().is_none_or(|key| key == "script");
    match (line.plugin.as_deref()?, &parameters[..]) {
        ("file", parameters) => Some(match served_file(parameters)? {
            ("file", path) => format!("file:{}", escaped(path)).into(),
            ("dir" | "directory", path) => format!("dir:{}?links=on", escaped(path)).into(),
            ("dirfd", number) => format!("dir:?dirfd={}&links=on", escaped(number)).into(),
            (_, number) => format!("file:?fd={}", escaped(number)).into(),
        }),
        ("sh", [(key, path), rest @ ..]) if script(key) => {
            let options = assignments(rest)?;
            Some(format!("sh:{}?{options}", escaped(path)).trim_end_matches('?').into())
        }
        // Other contents than the plugin's for the same seed.
        ("random", parameters) => {
            let (seeds, sizes): (Vec<_>, Vec<_>) =
                parameters.iter().cloned().partition(|(key, _)| key.as_deref() == Some("seed"));
            Some(
                format!("random:{}?{}", size(&sizes, "")?, assignments(&seeds)?)
                    .trim_end_matches('?')
                    .into(),
            )
        }
        ("zero", []) => Some("zero:0".into()),
        ("data", parameters) => natives::data(parameters).map(OsString::from),
        ("nbd", parameters) => nbd(parameters),
        ("python", [(key, path), rest @ ..]) if script(key) => {
            let options = assignments(rest)?;
            let threads =
                line.threads.map(|threads| format!("@threads={}", threads.clamp(1, 1024)));
            let options: Vec<_> =
                threads.into_iter().chain([options]).filter(|part| !part.is_empty()).collect();
            let options = options.join("&");
            Some(format!("python:{}?{options}", escaped(path)).trim_end_matches('?').into())
        }
        ("eval", methods) => Some(format!("eval:{}", assignments(methods)?).into()),
        _ => None,
    }
}

/// The URI of a server that is given by `uri`, `socket`, or `hostname` and `port`.
fn nbd(parameters: &[PluginParameter]) -> Option<OsString> {
    let mut uri = None;
    let mut socket = None;
    let mut host = None;
    let mut port = None;
    let mut export = None;
    for (key, value) in parameters {
        let place = match key.as_deref() {
            Some("uri") | None => &mut uri,
            Some("socket") => &mut socket,
            Some("hostname") => &mut host,
            Some("port") => &mut port,
            Some("export") => &mut export,
            Some(_) => return None,
        };
        *place = Some(value);
    }
    let export = export.map(|name| escaped(name)).unwrap_or_default();
    match (uri, socket, host, port) {
        (Some(uri), None, None, None) if export.is_empty() => Some(uri.into()),
        (None, Some(path), None, None) => {
            let path = std::path::absolute(path).ok()?;
            Some(format!("nbd+unix:///{export}?socket={}", escaped(path.to_str()?)).into())
        }
        (None, None, Some(host), port) if !host.is_empty() => {
            let port = port.map_or("10809", |port| port);
            if host.contains(':') {
                Some(format!("nbd://[{host}]:{port}/{export}").into())
            } else {
                Some(format!("nbd://{host}:{port}/{export}").into())
            }
        }
        _ => None,
    }
}

/// Parameters in the form of options; none if one is a bare value.
fn assignments(parameters: &[PluginParameter]) -> Option<String> {
    let all = parameters.iter().map(|(key, value)| {
        let key = key.as_deref()?;
        Some(format!("{}={}", escaped(key), escaped(value)))
    });
    Some(all.collect::<Option<Vec<_>>>()?.join("&"))
}

/// The preferred block size in bytes that a plugin reports itself, for its replacement.
pub fn preferred_block(plugin: &str) -> Option<u32> {
    match plugin {
        // A page of its sparse array.
        "memory" => Some(32 << 10),
        "sparse-random" => Some(4096),
        _ => None,
    }
}

/// The value of the only parameter, `size`; `otherwise` if there is none.
fn size(parameters: &[PluginParameter], otherwise: &str) -> Option<String> {
    let text = match parameters {
        [] if !otherwise.is_empty() => otherwise,
        [(key, value)] if key.as_deref().is_none_or(|key| key == "size") => value,
        _ => return None,
    };
    // The plugin reports an invalid size.
    blockhaul_catalog::parse_size(text).ok().map(|_| text.to_string())
}

/// A file that can be opened as requested. A plugin without write permission serves it read-only.
fn file(line: &NbdkitCommand) -> Option<OsString> {
    match served_file(&line.parameters)? {
        ("fd", number) => descriptor(number),
        ("dir", path) => folder(path),
        // The plugin lists files in the order of the directory, ours by name.
        ("directory", _) => None,
        ("dirfd", number) => folder_descriptor(number),
        (_, path) => openable(path, line).map(PathBuf::into_os_string),
    }
}

/// The only parameter of the plugin `file` that names a file, and its value. The others are hints
/// about the page cache, which change no data: the kernel decides here.
fn served_file(parameters: &[PluginParameter]) -> Option<(&'static str, &str)> {
    let mut served = None;
    for (key, value) in parameters {
        let key = match key.as_deref().unwrap_or("file") {
            "file" => "file",
            "fd" => "fd",
            "dir" => "dir",
            "directory" => "directory",
            "dirfd" => "dirfd",
            "cache" if matches!(value.as_str(), "default" | "none") => continue,
            "fadvise" if matches!(value.as_str(), "normal" | "random" | "sequential") => continue,
            "reduce-memory-pressure" if blockhaul_catalog::parse_switch(value).is_ok() => continue,
            _ => return None,
        };
        if served.replace((key, value.as_str())).is_some() {
            return None;
        }
    }
    served
}

/// A file by its absolute path, if it can be opened as requested.
fn openable(path: &str, line: &NbdkitCommand) -> Option<PathBuf> {
    let path = std::fs::canonicalize(path).ok()?;
    File::options().read(true).write(!line.readonly).open(&path).ok()?;
    Some(path)
}

/// Concatenated files. The plugin of 1.42 crashes with SIGSEGV on extents requests for them.
fn split(line: &NbdkitCommand) -> Option<OsString> {
    let is_file = |key: &Option<String>| key.as_deref().is_none_or(|key| key == "file");
    let files = &line.parameters;
    if files.is_empty() || files.len() > SPLIT_MAX || !files.iter().all(|(key, _)| is_file(key)) {
        return None;
    }
    let paths = files.iter().map(|(_, path)| Some(escaped(openable(path, line)?.to_str()?)));
    let paths = paths.collect::<Option<Vec<_>>>()?;
    Some(format!("split:{}", paths.join(",")).into())
}

fn descriptor_number(number: &str) -> Option<i32> {
    blockhaul_catalog::parse_number(number).ok().filter(|number| *number > 2)
}

/// An open file or disk that was passed in. The plugin reports errors.
fn descriptor(number: &str) -> Option<OsString> {
    let parsed = descriptor_number(number)?;
    let kind = std::fs::metadata(format!("/proc/self/fd/{parsed}")).ok()?.file_type();
    (kind.is_file() || kind.is_block_device()).then(|| format!("file:?fd={parsed}").into())
}

/// A directory whose files are chosen by name, including links and disks, as in the plugin.
fn folder(path: &str) -> Option<OsString> {
    let path = std::fs::canonicalize(path).ok().filter(|path| path.is_dir())?;
    Some(format!("dir:{}?links=on", escaped(path.to_str()?)).into())
}

/// The same, as an open descriptor.
fn folder_descriptor(number: &str) -> Option<OsString> {
    let parsed = descriptor_number(number)?;
    let kind = std::fs::metadata(format!("/proc/self/fd/{parsed}")).ok()?.file_type();
    kind.is_dir().then(|| format!("dir:?dirfd={parsed}&links=on").into())
}

/// The plugin itself, hosted, with filters over it.
pub fn hosted(line: &NbdkitCommand, filters: &[String]) -> OsString {
    let mut options = Vec::new();
    if let Some(threads) = line.threads {
        options.push(format!("@threads={}", threads.min(1024)));
    }
    options.extend(filters.iter().map(|filter| format!("@filter={}", escaped(filter))));
    for (name, flag, value) in &line.debug {
        options.push(format!("@debug={}", escaped(&format!("{name}.{flag}={value}"))));
    }
    for (key, value) in &line.parameters {
        // A bare value with `=` remains one, as that is escaped.
        let key = key.as_ref().map(|key| format!("{}=", escaped(key))).unwrap_or_default();
        let option = key + &escaped(value);
        // An empty value without a key is recognized by its `=`.
        options.push(if option.is_empty() { "=".into() } else { option });
    }
    let plugin = escaped(line.plugin.as_deref().unwrap_or_default());
    let word = format!("nbdkit:{plugin}?{}", options.join("&"));
    word.trim_end_matches('?').into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_about_the_page_cache_are_accepted_and_others_are_the_plugins() {
        let served = |words: &[&str]| {
            let parameters: Vec<_> =
                words.iter().map(|word| super::super::line::parameter(word)).collect();
            served_file(&parameters).map(|(key, value)| format!("{key}={value}"))
        };
        assert_eq!(served(&["/a", "cache=none"]).unwrap(), "file=/a");
        let words = ["dir=/a", "reduce-memory-pressure=on", "fadvise=sequential"];
        assert_eq!(served(&words).unwrap(), "dir=/a");
        for bad in [&["cache=none"][..], &["/a", "/b"], &["/a", "cache=x"], &["/a", "rdelay=1"]] {
            assert_eq!(served(bad), None, "{bad:?}");
        }
    }
}
