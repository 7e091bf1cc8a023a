//! Maps nbdkit's filters to layers. If there is no layer for a filter or its parameters, the filter
//! itself is hosted, and with it all filters below it.

use super::line::{PluginParameter, escaped};

/// A filter with an equivalent layer, and its parameters.
struct FilterTranslation {
    filter: &'static str,
    layer: &'static str,
    /// Parameters with the same name and values here.
    same: &'static [&'static str],
    keys: &'static [ParameterTranslation],
    /// An option of the layer, and its value if no parameter sets it: where the defaults differ.
    default: Option<(&'static str, &'static str)>,
}

/// A row for a filter whose layer has the same defaults.
const fn row(
    filter: &'static str,
    layer: &'static str,
    same: &'static [&'static str],
    keys: &'static [ParameterTranslation],
) -> FilterTranslation {
    FilterTranslation { filter, layer, same, keys, default: None }
}

impl FilterTranslation {
    /// The option of the layer for a parameter of the filter, and the conversion of its value.
    fn option(&self, parameter: &str) -> Option<(&'static str, ValueConversion)> {
        let same = self.same.iter().find(|name| **name == parameter).map(|name| (*name, Same));
        let key = || self.keys.iter().find(|key| key.0 == parameter).map(|key| (key.1, key.2));
        same.or_else(key)
    }

    /// The names of the parameters, and of the layer's options.
    fn options(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let same = self.same.iter().map(|name| (*name, *name));
        same.chain(self.keys.iter().map(|ParameterTranslation(name, option, _)| (*name, *option)))
    }
}

/// A parameter of a filter: its name there, its name here, and the conversion of its value.
struct ParameterTranslation(&'static str, &'static str, ValueConversion);

#[derive(Clone, Copy)]
enum ValueConversion {
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
    /// A probability as a percentage.
    Share,
    /// Names that form one list, which a comma separates.
    Names,
}

use ValueConversion::{Bits, List, Names, Path, Same, Secret, Share, Switch};

const ROWS: &[FilterTranslation] = &[
    row("blocksize", "blocksize", &["minblock", "maxdata", "maxlen"], &[]),
    row(
        "blocksize-policy",
        "blocksize",
        &[],
        &[
            ParameterTranslation("blocksize-minimum", "minimum", Same),
            ParameterTranslation("blocksize-preferred", "preferred", Same),
            ParameterTranslation("blocksize-maximum", "maximum", Same),
            ParameterTranslation("blocksize-error-policy", "error-policy", Same),
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
            ParameterTranslation("rdelay", "read", Same),
            ParameterTranslation("wdelay", "write,zero,trim", Same),
            ParameterTranslation("delay-read", "read", Same),
            ParameterTranslation("delay-reads", "read", Same),
            ParameterTranslation("delay-write", "write", Same),
            ParameterTranslation("delay-writes", "write", Same),
            ParameterTranslation("delay-zero", "zero", Same),
            ParameterTranslation("delay-zeroes", "zero", Same),
            ParameterTranslation("delay-trim", "trim", Same),
            ParameterTranslation("delay-trims", "trim", Same),
            ParameterTranslation("delay-discard", "trim", Same),
            ParameterTranslation("delay-discards", "trim", Same),
            ParameterTranslation("delay-extents", "extents", Same),
            ParameterTranslation("delay-extent", "extents", Same),
            ParameterTranslation("delay-cache", "cache", Same),
        ],
    ),
    FilterTranslation {
        filter: "error",
        layer: "error",
        same: &["error"],
        keys: &[
            ParameterTranslation("error-rate", "all", Share),
            ParameterTranslation("error-pread-rate", "read", Share),
            ParameterTranslation("error-pwrite-rate", "write", Share),
            ParameterTranslation("error-trim-rate", "trim", Share),
            ParameterTranslation("error-zero-rate", "zero", Share),
            ParameterTranslation("error-extents-rate", "extents", Share),
            ParameterTranslation("error-cache-rate", "cache", Share),
        ],
        // Nothing fails unless a rate is given.
        default: Some(("all", "0%")),
    },
    row("evil", "evil", &["evil", "evil-probability", "evil-stuck-probability", "evil-seed"], &[]),
    row("exitlast", "exitlast", &[], &[]),
    row(
        "exitwhen",
        "exitwhen",
        &["exit-when-script", "exit-when-poll"],
        &[
            ParameterTranslation("exit-when-file-created", "exit-when-file-created", Path),
            ParameterTranslation("exit-when-file-deleted", "exit-when-file-deleted", Path),
            ParameterTranslation("exit-when-pipe-closed", "exit-when-pipe-closed", List),
            ParameterTranslation("exit-when-fd-closed", "exit-when-pipe-closed", List),
            ParameterTranslation("exit-when-process-exits", "exit-when-process-exits", List),
            ParameterTranslation("exit-when-pid-exits", "exit-when-process-exits", List),
        ],
    ),
    row(
        "exportname",
        "exportname",
        &["default-export", "exportname-list", "exportdesc"],
        &[
            ParameterTranslation("exportname-strict", "exportname-strict", Switch),
            ParameterTranslation("exportname", "exportname", Names),
        ],
    ),
    row("extentlist", "extentlist", &[], &[ParameterTranslation("extentlist", "extentlist", Path)]),
    row("fua", "fua", &["fuamode"], &[ParameterTranslation("fua-mode", "fuamode", Same)]),
    row("gzip", "gz", &[], &[]),
    row(
        "ip",
        "ip",
        &[],
        &[ParameterTranslation("allow", "allow", List), ParameterTranslation("deny", "deny", List)],
    ),
    row("limit", "limit", &["limit"], &[]),
    FilterTranslation {
        filter: "log",
        layer: "log",
        same: &[],
        keys: &[
            ParameterTranslation("logfile", "file", Path),
            ParameterTranslation("logappend", "append", Switch),
        ],
        default: Some(("append", "off")),
    },
    row("luks", "luks", &[], &[ParameterTranslation("passphrase", "passphrase", Secret)]),
    row("multi-conn", "multi-conn", &[], &[ParameterTranslation("multi-conn-mode", "mode", Same)]),
    row(
        "nocache",
        "nocache",
        &["cachemode"],
        &[ParameterTranslation("cache-mode", "cachemode", Same)],
    ),
    row("noextents", "noextents", &[], &[]),
    row(
        "nozero",
        "nozero",
        &["zeromode", "fastzeromode"],
        &[
            ParameterTranslation("zero-mode", "zeromode", Same),
            ParameterTranslation("fast-zero-mode", "fastzeromode", Same),
        ],
    ),
    row("offset", "offset", &["offset", "range"], &[]),
    row("partition", "partition", &["partition", "partition-sectorsize"], &[]),
    row("pause", "pause", &[], &[ParameterTranslation("pause-control", "pause-control", Path)]),
    row("protect", "protect", &[], &[ParameterTranslation("protect", "protect", List)]),
    row("rate", "rate", &[], &[ParameterTranslation("rate", "rate", Bits)]),
    row("readahead", "readahead", &[], &[]),
    row("readonly", "readonly", &[], &[]),
    row(
        "rotational",
        "rotational",
        &[],
        &[ParameterTranslation("rotational", "rotational", Switch)],
    ),
    row(
        "retry",
        "retry",
        &["retries", "retry-delay"],
        &[
            ParameterTranslation("retry-exponential", "retry-exponential", Switch),
            ParameterTranslation("retry-readonly", "retry-readonly", Switch),
        ],
    ),
    row(
        "retry-request",
        "retry-request",
        &[],
        &[
            ParameterTranslation("retry-request-retries", "retries", Same),
            ParameterTranslation("retry-request-delay", "delay", Same),
        ],
    ),
    row(
        "scan",
        "scan",
        &["scan-size"],
        &[
            ParameterTranslation("scan-ahead", "scan-ahead", Switch),
            ParameterTranslation("scan-clock", "scan-clock", Switch),
            ParameterTranslation("scan-forever", "scan-forever", Switch),
        ],
    ),
    FilterTranslation {
        filter: "stats",
        layer: "stats",
        same: &[],
        keys: &[
            ParameterTranslation("statsfile", "file", Path),
            ParameterTranslation("statsappend", "append", Switch),
        ],
        default: Some(("append", "off")),
    },
    row("swab", "swab", &["swab-bits"], &[]),
    row("tar", "tar", &["tar-entry", "tar-limit"], &[]),
    row("tls-fallback", "tls-fallback", &["tlsreadme"], &[]),
    row("truncate", "truncate", &["truncate", "round-up", "round-down"], &[]),
    row("xz", "xz", &["xz-max-block", "xz-max-depth"], &[]),
];

/// Filters that scripts can distinguish from their layers: by what they print, by the sizes that they
/// advertise, by how often they call and open the plugin, or by their treatment of flags and of plugins
/// without hints.
const DIFFERENT: &[&str] = &[
    "blocksize",
    "cacheextents",
    "exportname",
    "fua",
    "log",
    "multi-conn",
    "readahead",
    "retry",
    "retry-request",
    "scan",
    "stats",
];

/// Whether scripts can distinguish the layer from the filter.
pub fn differs(filter: &str, parameters: &[PluginParameter]) -> bool {
    let has = |key: &str| parameters.iter().any(|(name, _)| name.as_deref() == Some(key));
    // What virtnbdmap gives: requests are cut in the same way.
    let only_cuts = has("maxlen") && !has("minblock") && !has("maxdata");
    DIFFERENT.contains(&filter) && !(filter == "blocksize" && only_cuts)
}

/// The layer in the place of a filter.
pub fn layer_name(filter: &str) -> Option<&'static str> {
    ROWS.iter().find(|row| row.filter == filter).map(|row| row.layer)
}

/// The parameters of a filter with a layer: their names, and the names of the layer's options.
pub fn keys(filter: &str) -> impl Iterator<Item = (&'static str, &'static str)> {
    let rows = ROWS.iter().filter(move |row| row.filter == filter);
    rows.flat_map(FilterTranslation::options)
}

/// Removes filters that change nothing: `swab` with words of 8 bits, for which nbdkit 1.42 writes
/// uninitialized memory.
pub fn drop_idle(filters: &mut Vec<String>, parameters: &mut Vec<PluginParameter>) {
    let is_bits = |(name, _): &PluginParameter| name.as_deref() == Some("swab-bits");
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
    parameters: &mut Vec<PluginParameter>,
    known: &dyn Fn(&str) -> bool,
) -> Option<String> {
    let row = ROWS.iter().find(|row| row.filter == filter)?;
    let mut options: Vec<(&str, String)> = Vec::new();
    let mut left = Vec::new();
    for (name, value) in parameters.iter() {
        let Some((names, convert)) = name.as_deref().and_then(|name| row.option(name)) else {
            left.push((name.clone(), value.clone()));
            continue;
        };
        let value = convert.apply(value)?;
        for option in names.split(',') {
            match options.iter_mut().find(|(name, _)| *name == option) {
                Some((_, list)) if matches!(convert, List | Names | Path) => {
                    *list += &format!(",{value}");
                }
                // The filter itself handles repeated parameters.
                Some(_) => return None,
                None => options.push((option, value.clone())),
            }
        }
    }
    let missing = |option: &str| options.iter().all(|(name, _)| *name != option);
    if let Some((option, value)) = row.default.filter(|(option, _)| missing(option)) {
        options.push((option, value.into()));
    }
    // A parameter of this filter that is not in the table: the layer does not support it.
    let prefix = format!("{filter}-");
    let own = |(name, _): &PluginParameter| {
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
    ("blocksize-policy", "blocksize-write-disconnect"),
    ("cow", "cow-on-cache"),
    ("cow", "cow-on-read"),
    ("delay", "delay-open"),
    ("delay", "delay-close"),
    ("delay", "delay-fast-zero"),
    ("fua", "flush-on-close"),
    ("log", "logscript"),
    ("rate", "burstiness"),
    ("rate", "connection-rate"),
    ("rate", "connection-rate-file"),
    ("stats", "statsthreshold"),
    ("tar", "tar"),
];

impl ValueConversion {
    /// The value in the form for layers; `None`: not possible.
    fn apply(self, value: &str) -> Option<String> {
        match self {
            Same | List => Some(value.to_string()),
            Names => (!value.is_empty() && !value.contains(',')).then(|| value.to_string()),
            Share => Some(format!("{}%", percent(value)?)),
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

/// The percentage of a probability: `25%`, `0.25`, `1:4` or `1/4`.
fn percent(text: &str) -> Option<f64> {
    let number = |text: &str| text.parse::<f64>().ok();
    let percent = match (text.strip_suffix('%'), text.split_once([':', '/'])) {
        (Some(percent), _) => number(percent)?,
        (None, Some((part, whole))) => 100.0 * number(part)? / number(whole)?,
        (None, None) => 100.0 * number(text)?,
    };
    (0.0..=100.0).contains(&percent).then_some(percent)
}

#[cfg(test)]
mod tests {
    use blockhaul_catalog::Registry;

    use super::*;

    fn words(text: &str) -> Vec<PluginParameter> {
        text.split_whitespace().map(super::super::line::parameter).collect()
    }

    fn taken(filter: &str, text: &str) -> (Option<String>, Vec<PluginParameter>) {
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
        assert_eq!(taken("error", "error=EPERM").0.unwrap(), "error?error=EPERM&all=0%25");
        assert_eq!(taken("error", "error-pread-rate=1:4").0.unwrap(), "error?read=25%25&all=0%25");
        assert_eq!(taken("error", "error-rate=0.5").0.unwrap(), "error?all=50%25");
        assert_eq!(taken("delay", "wdelay=1ms").0.unwrap(), "delay?write=1ms&zero=1ms&trim=1ms");
        assert_eq!(taken("fua", "fua-mode=pass").0.unwrap(), "fua?fuamode=pass");
        assert_eq!(
            taken("exportname", "exportname=a exportname=b exportname-strict=true").0.unwrap(),
            "exportname?exportname=a%2cb&exportname-strict=on"
        );
        assert_eq!(taken("stats", "statsfile=/s").0.unwrap(), "stats?file=/s&append=off");
    }

    #[test]
    fn visible_differences_depend_on_parameters() {
        assert!(differs("blocksize", &words("/disk")) && differs("retry", &[]));
        assert!(!differs("blocksize", &words("/disk maxlen=4k")) && !differs("cow", &[]));
        assert!(differs("blocksize", &words("maxlen=4k minblock=4k")));
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
            ("blocksize-policy", "blocksize-write-disconnect=1M"),
            ("delay", "rdelay=1 delay-open=2"),
            ("delay", "wdelay=1 delay-zero=2"),
            ("error", "error-pread=EIO error-rate=1"),
            ("error", "error-rate=2"),
            ("exportname", "exportname=a,b"),
            ("fua", "flush-on-close=true"),
            ("log", "logscript=true"),
            ("stats", "statsfile=/s statsthreshold=50"),
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
            let options = row.options().flat_map(|(_, options)| options.split(','));
            for option in options.chain(row.default.map(|(option, _)| option)) {
                let known = layer.params().iter().any(|param| param.name == option);
                assert!(known, "{}: {option}", row.layer);
            }
        }
    }
}
