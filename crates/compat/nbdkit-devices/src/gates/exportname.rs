//! `exportname`: sets the export names that clients see and may request.

use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{
    Export, ExportClient, Gate, GateKind, ListedExport, ParamKind, ParamValues,
};

use super::rule::{ExportChoice, GateClient, GateRule, gate};
use blockhaul_layers::support::{param, param_or, usage};

/// The gate `exportname`.
pub static EXPORTNAME: GateKind = GateKind {
    name: "exportname",
    summary: "sets the export names that clients see and may ask for",
    manual: "Clients that request the empty name get `default-export`. `exportname` is a list of names, \
separated by commas. With `exportname-strict=on`, clients may request only these names, and \
the empty one if it leads to one of them. `exportname-list` selects the list that clients see: \
`keep` (unchanged), `error` (refused), `empty`, `defaultonly` (the default export) or \
`explicit` (the names of `exportname`). `exportdesc` replaces descriptions: `keep`, `none` or \
`fixed:TEXT`.

An export that is served under one name has only that name: names given here must be names \
that the device below knows.",
    example: r#"
blockhaul serve -e disk memory:1G \
  --layer 'exportname?default-export=disk&exportdesc=fixed:nightly' \
  --run 'blockhaul info --list nbd+unix:///?socket=$unixsocket'
"#,
    params: &[
        param_or("default-export", ParamKind::Text, "", "The export for clients that ask for the empty \
                                                         name."),
        param_or(
            "exportname-list",
            ParamKind::Choice(&["keep", "error", "empty", "defaultonly", "explicit"]),
            "keep",
            "What clients see in a list of exports.",
        ),
        param_or("exportname-strict", ParamKind::Switch, "off", "Refuse names that are not in exportname."),
        param("exportname", ParamKind::Text, "Export names, separated by commas."),
        param_or("exportdesc", ParamKind::Text, "keep", "Descriptions of exports: keep, none or \
                                                         fixed:TEXT."),
    ],
    configure: |args, _| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Gate>> {
    let names = args.text("exportname").unwrap_or("");
    let description = match args.text("exportdesc").unwrap_or("keep") {
        "keep" => None,
        "none" => Some(String::new()),
        text => match text.strip_prefix("fixed:") {
            Some(fixed) => Some(fixed.to_string()),
            None => return Err(usage("exportname: exportdesc must be keep, none or fixed:TEXT")),
        },
    };
    gate(Arc::new(ExportNameRule {
        default: args.text("default-export").unwrap_or("").to_string(),
        list: args.text("exportname-list").unwrap_or("keep").to_string(),
        strict: args.switch("exportname-strict"),
        names: names.split(',').filter(|name| !name.is_empty()).map(String::from).collect(),
        description,
    }))
}

struct ExportNameRule {
    default: String,
    list: String,
    strict: bool,
    names: Vec<String>,
    /// Replaces the description of the export below.
    description: Option<String>,
}

impl GateRule for ExportNameRule {
    fn admit(self: Arc<Self>, _client: &ExportClient) -> Result<Arc<dyn GateClient>> {
        Ok(self)
    }
}

impl GateClient for ExportNameRule {
    fn open(&self, name: &str, _tls: bool) -> Result<ExportChoice> {
        let name = if name.is_empty() { &self.default } else { name };
        if self.strict && !self.names.iter().any(|known| known == name) {
            return Err(Error::new(Kind::NotFound, "there is no export of this name"));
        }
        Ok(ExportChoice::Name(name.to_string()))
    }

    fn opened(&self, mut export: Export) -> Export {
        if let Some(description) = &self.description {
            export.description = Some(description.clone());
        }
        export
    }

    fn list(&self, listed: Vec<ListedExport>, _tls: bool) -> Result<Vec<ListedExport>> {
        let known = |name: &String| {
            let below = listed.iter().find(|listed| listed.name == *name);
            let description = below.map(|below| below.description.clone()).unwrap_or_default();
            ListedExport { name: name.clone(), description }
        };
        let mut shown = match self.list.as_str() {
            "error" => {
                return Err(Error::new(Kind::Refused, "exports are not listed here"));
            }
            "empty" => Vec::new(),
            "defaultonly" => vec![known(&self.default)],
            "explicit" => self.names.iter().map(known).collect(),
            _ => listed,
        };
        if let Some(description) = &self.description {
            shown.iter_mut().for_each(|shown| shown.description = description.clone());
        }
        Ok(shown)
    }

    fn needs_list(&self, _tls: bool) -> bool {
        !matches!(self.list.as_str(), "error" | "empty")
    }
}
