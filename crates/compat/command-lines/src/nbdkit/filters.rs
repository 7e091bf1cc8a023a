//! Maps nbdkit's filters to layers. If there is no layer for a filter or its parameters, the filter
//! itself is hosted, and with it all filters below it.

use super::line::{Parameter, escaped};

/// A filter with an equivalent layer, and its parameters.
struct Row {
    filter: &'static str,
    layer: &'static str,
    /// Parameters with the same name and values here.
    same: &'static [&'static str],
    keys: &'static [Key],
}

impl Row {
    /// The option of the layer for a parameter of the filter, and the conversion of its value.
    fn option(&self, parameter: &str) -> Option<(&'static str, Convert)> {
        let same = self.same.iter().find(|name| **name == parameter).map(|name| (*name, Same));
        let key = || self.keys.iter().find(|key| key.0 == parameter).map(|key| (key.1, key.2));
        same.or_else(key)
    }
}

/// A parameter of a filter: its name there, its name here, and the conversion of its value.
struct Key(&'static str, &'static str, Convert);

#[derive(Clone, Copy)]
enum Convert {
    /// None.
    Same,
    /// Repeated values form one list.
    List,
    /// Bits become bytes.
    Bits,
    /// An absolute path: a server in the background leaves the directory.
    Path,
    /// A password; one that is typed or inherited is read before the server goes to the background.
    Secret,
    /// nbdkit's boolean words.
    Switch,
}

use Convert::{Bits, List, Path, Same, Secret, Switch};

const ROWS: &[Row] = &[
    row("blocksize", "blocksize", &["minblock", "maxdata", "maxlen"], &[]),
    row(
        "blocksize-policy",
        "blocksize",
        &[],
        &[
            Key("blocksize-minimum", "minimum", Same),
            Key("blocksize-preferred", "preferred", Same),
            Key("blocksize-maximum", "maximum", Same),
            Key("blocksize-error-policy", "error-policy", Same),
        ],
    ),
    row(
        "cache",
        "cache",
        &[
            "cache",
            "cache-on-read",
            "cache-min-block-size",
            "cache-max-size",
            "cache-high-threshold",
            "cache-low-threshold",
        ],
        &[],
    ),
    row("cacheextents", "extents-cache", &[], &[]),
    row("checkwrite", "checkwrite", &[], &[]),
    row("cow", "cow", &["cow-block-size"], &[]),
    row(
        "delay",
        "delay",
        &[],
        &[
            Key("rdelay", "read", Same),
            Key("delay-read", "read", Same),
            Key("delay-reads", "read", Same),
            Key("delay-write", "write", Same),
            Key("delay-writes", "write", Same),
            Key("delay-zero", "zero", Same),
            Key("delay-zeroes", "zero", Same),
            Key("delay-trim", "trim", Same),
            Key("delay-trims", "trim", Same),
            Key("delay-discard", "trim", Same),
            Key("delay-discards", "trim", Same),
            Key("delay-extents", "extents", Same),
            Key("delay-extent", "extents", Same),
            Key("delay-cache", "cache", Same),
        ],
    ),
    row("evil", "evil", &["evil", "evil-probability", "evil-stuck-probability", "evil-seed"], &[]),
    row("exitlast", "exitlast", &[], &[]),
    row(
        "exitwhen",
        "exitwhen",
        &["exit-when-script", "exit-when-poll"],
        &[
            Key("exit-when-file-created", "exit-when-file-created", Path),
            Key("exit-when-file-deleted", "exit-when-file-deleted", Path),
            Key("exit-when-pipe-closed", "exit-when-pipe-closed", List),
            Key("exit-when-fd-closed", "exit-when-pipe-closed", List),
            Key("exit-when-process-exits", "exit-when-process-exits", List),
            Key("exit-when-pid-exits", "exit-when-process-exits", List),
        ],
    ),
    row("extentlist", "extentlist", &[], &[Key("extentlist", "extentlist", Path)]),
    row("fua", "fua", &["fuamode"], &[]),
    row("gzip", "gz", &[], &[]),
    row("ip", "ip", &[], &[Key("allow", "allow", List), Key("deny", "deny", List)]),
    row("limit", "limit", &["limit"], &[]),
    row("luks", "luks", &[], &[Key("passphrase", "passphrase", Secret)]),
    row("multi-conn", "multi-conn", &[], &[Key("multi-conn-mode", "mode", Same)]),
    row("nocache", "nocache", &["cachemode"], &[]),
    row("noextents", "noextents", &[], &[]),
    row("nozero", "nozero", &["zeromode", "fastzeromode"], &[]),
    row("offset", "offset", &["offset", "range"], &[]),
    row("partition", "partition", &["partition", "partition-sectorsize"], &[]),
    row("pause", "pause", &[], &[Key("pause-control", "pause-control", Path)]),
    row("protect", "protect", &[], &[Key("protect", "protect", List)]),
    row("rate", "rate", &[], &[Key("rate", "rate", Bits)]),
    row("readahead", "readahead", &[], &[]),
    row("readonly", "readonly", &[], &[]),
    row("rotational", "rotational", &[], &[Key("rotational", "rotational", Switch)]),
    row(
        "retry",
        "retry",
        &["retries", "retry-delay"],
        &[
            Key("retry-exponential", "retry-exponential", Switch),
            Key("retry-readonly", "retry-readonly", Switch),
        ],
    ),
    row(
        "retry-request",
        "retry-request",
        &[],
        &[Key("retry-request-retries", "retries", Same), Key("retry-request-delay", "delay", Same)],
    ),
    row(
        "scan",
        "scan",
        &["scan-size"],
        &[
            Key("scan-ahead", "scan-ahead", Switch),
            Key("scan-clock", "scan-clock", Switch),
            Key("scan-forever", "scan-forever", Switch),
        ],
    ),
    row("swab", "swab", &["swab-bits"], &[]),
    row("tar", "tar", &["tar-entry", "tar-limit"], &[]),
    row("tls-fallback", "tls-fallback", &["tlsreadme"], &[]),
    row("truncate", "truncate", &["truncate", "round-up", "round-down"], &[]),
    row("xz", "xz", &["xz-max-block", "xz-max-depth"], &[]),
];

const fn row(
    filter: &'static str,
    layer: &'static str,
    same: &'static [&'static str],
    keys: &'static [Key],
) -> Row {
    Row { filter, layer, same, keys }
}

/// Filters whose layers work in a different way that scripts can see: advertised sizes, how often
/// the plugin is called and opened, the handling of flags, and of plugins without hints.
const DIFFERENT: &[&str] = &[
    "blocksize",
    "blocksize-policy",
    "cacheextents",
    "fua",
    "multi-conn",
    "nozero",
    "readahead",
    "retry",
    "retry-request",
    "scan",
    "swab",
];

/// Whether scripts can distinguish the layer from the filter.
pub fn differs(filter: &str) -> bool {
    DIFFERENT.contains(&filter)
}

/// Removes filters that change nothing: `swab` with words of 8 bits, for which nbdkit 1.42 writes
/// uninitialized memory.
pub fn drop_idle(filters: &mut Vec<String>, parameters: &mut Vec<Parameter>) {
    let is_bits = |(name, _): &Parameter| name.as_deref() == Some("swab-bits");
    let mut said = parameters.iter().filter(|parameter| is_bits(parameter));
    let (Some((_, bits)), None) = (said.next(), said.next()) else { return };
    let mut swabs = filters.iter().filter(|filter| *filter == "swab");
    if matches!(blockhaul_catalog::parse_number::<u64>(bits), Ok(8))
        && swabs.next().is_some()
        && swabs.next().is_none()
    {
        filters.retain(|filter| filter != "swab");
        parameters.retain(|parameter| !is_bits(parameter));
    }
}

/// A filter as a layer, in the form of `--layer`, with its parameters removed from `parameters`.
/// `None`, and nothing removed: there is no equivalent layer.
pub fn layer(
    filter: &str,
    parameters: &mut Vec<Parameter>,
    known: &dyn Fn(&str) -> bool,
) -> Option<String> {
    let row = ROWS.iter().find(|row| row.filter == filter)?;
    let mut options: Vec<(&str, String)> = Vec::new();
    let mut left = Vec::new();
    for (name, value) in parameters.iter() {
        let Some((option, convert)) = name.as_deref().and_then(|name| row.option(name)) else {
            left.push((name.clone(), value.clone()));
            continue;
        };
        let value = convert.apply(value)?;
        match options.iter_mut().find(|(name, _)| *name == option) {
            Some((_, list)) if matches!(convert, List | Path) => *list += &format!(",{value}"),
            // The filter itself handles repeated parameters.
            Some(_) => return None,
            None => options.push((option, value)),
        }
    }
    // A parameter of this filter that is not in the table: the layer does not support it.
    let prefix = format!("{filter}-");
    let own = |(name, _): &Parameter| {
        let name = name.as_deref().unwrap_or_default();
        name.starts_with(&prefix) || OTHERS.iter().any(|(of, key)| *of == filter && *key == name)
    };
    if left.iter().any(own) {
        return None;
    }
    let options: Vec<String> =
        options.iter().map(|(key, value)| format!("{key}={}", escaped(value))).collect();
    let layer = format!("{}?{}", row.layer, options.join("&"));
    let layer = layer.trim_end_matches('?').to_string();
    if !known(&layer) {
        return None;
    }
    *parameters = left;
    Some(layer)
}

/// Parameters of filters with layers that those layers do not support, and whose names do not show
/// the filter.
const OTHERS: &[(&str, &str)] = &[
    ("cow", "cow-on-cache"),
    ("cow", "cow-on-read"),
    ("delay", "wdelay"),
    ("delay", "delay-open"),
    ("delay", "delay-close"),
    ("delay", "delay-fast-zero"),
    ("rate", "burstiness"),
    ("rate", "connection-rate"),
    ("rate", "connection-rate-file"),
    ("tar", "tar"),
];

impl Convert {
    /// The value in the form for layers; `None`: not possible.
    fn apply(self, value: &str) -> Option<String> {
        match self {
            Same | List => Some(value.to_string()),
            Bits => {
                let bits = blockhaul_catalog::parse_size(value).ok()?;
                (bits >= 8).then(|| (bits / 8).to_string())
            }
            Path => Some(std::path::absolute(value).ok()?.to_str()?.to_string()),
            Secret => match (value.strip_prefix('+'), value.starts_with('-')) {
                (_, true) => None,
                (Some(path), _) => Some(format!("+{}", Path.apply(path)?)),
                (None, _) => Some(value.to_string()),
            },
            Switch => {
                if blockhaul_catalog::parse_switch(value).ok()? {
                    Some("on".into())
                } else {
                    Some("off".into())
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use blockhaul_catalog::Registry;

    use super::*;

    fn words(text: &str) -> Vec<Parameter> {
        text.split_whitespace().map(super::super::line::parameter).collect()
    }

    fn taken(filter: &str, text: &str) -> (Option<String>, Vec<Parameter>) {
        let mut parameters = words(text);
        let layer = layer(filter, &mut parameters, &|_| true);
        (layer, parameters)
    }

    #[test]
    fn filters_take_their_parameters_and_leave_the_others() {
        let (layer, left) = taken("offset", "file=x offset=1M range=2M y");
        assert_eq!(layer.as_deref(), Some("offset?offset=1M&range=2M"));
        assert_eq!(left, words("file=x y"));
        assert_eq!(
            taken("ip", "allow=a,b deny=all allow=c").0.unwrap(),
            "ip?allow=a%2cb%2cc&deny=all"
        );
        assert_eq!(taken("rate", "rate=8M").0.unwrap(), "rate?rate=1048576");
        assert_eq!(taken("luks", "passphrase=+/x").0.unwrap(), "luks?passphrase=%2b/x");
        assert_eq!(taken("noextents", "x=1").0.unwrap(), "noextents");
    }

    #[test]
    fn words_of_a_byte_are_left_as_they_are() {
        let idle = |filters: &str, text: &str| {
            let mut filters: Vec<_> = filters.split(' ').map(String::from).collect();
            let mut parameters = words(text);
            drop_idle(&mut filters, &mut parameters);
            (filters.join(" "), parameters)
        };
        assert_eq!(idle("cow swab", "swab-bits=8 1M"), ("cow".into(), words("1M")));
        for (filters, text) in [("swab", "swab-bits=16"), ("swab", "1M"), ("cow", "swab-bits=8")] {
            assert_eq!(idle(filters, text), (filters.into(), words(text)));
        }
    }

    #[test]
    fn what_layers_cannot_do_is_left_whole() {
        for (filter, text) in [
            ("delay", "rdelay=1 delay-open=2"),
            ("rate", "rate=1M connection-rate=2"),
            ("retry", "retries=1 retries=2"),
            ("luks", "passphrase=-"),
            ("tar", "tar-entry=x tar=gtar"),
            ("ddrescue", ""),
            ("readonly", "readonly-file=x"),
        ] {
            let (layer, left) = taken(filter, text);
            assert_eq!((layer, left), (None, words(text)), "{filter}");
        }
        let mut parameters = words("offset=1");
        assert_eq!(super::layer("offset", &mut parameters, &|_| false), None);
        assert_eq!(parameters, words("offset=1"));
    }

    #[test]
    fn every_row_names_a_layer_and_its_options() {
        let mut layers = blockhaul_layers::all();
        layers.extend(blockhaul_nbdkit_devices::layers::all());
        let gates = blockhaul_nbdkit_devices::gates::all();
        let registry = Registry { layers, gates, ..Registry::default() };
        for row in ROWS {
            let layer = registry.kind(row.layer).unwrap();
            for option in row.same.iter().chain(row.keys.iter().map(|key| &key.1)) {
                let known = layer.params().iter().any(|param| param.name == *option);
                assert!(known, "{}: {option}", row.layer);
            }
        }
    }
}
