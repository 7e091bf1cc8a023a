//! What a registry says about the credentials that it wants (RFC 9110, section 11.6.1).

/// Bytes of the longest field that is parsed.
const FIELD_MAX: usize = 8 << 10;

/// A way to authenticate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Challenge {
    /// A user and a password with each request.
    Basic,
    /// A token from another service.
    Bearer(TokenService),
}

/// A service of tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TokenService {
    pub(super) realm: String,
    pub(super) service: Option<String>,
    pub(super) scope: Option<String>,
}

/// The ways in the fields `WWW-Authenticate` of a response: a token first.
pub(super) fn challenge<'a>(fields: impl Iterator<Item = &'a str>) -> Option<Challenge> {
    let mut found = None;
    for field in fields.filter(|field| field.len() <= FIELD_MAX) {
        for (scheme, parameters) in schemes(field) {
            let value = |name: &str| {
                let mut all = parameters.iter();
                all.find(|(key, _)| key == name).map(|(_, value)| value.clone())
            };
            match (scheme.as_str(), value("realm")) {
                ("bearer", Some(realm)) => {
                    let (service, scope) = (value("service"), value("scope"));
                    return Some(Challenge::Bearer(TokenService { realm, service, scope }));
                }
                ("basic", _) => found = Some(Challenge::Basic),
                _ => {}
            }
        }
    }
    found
}

type Scheme = (String, Vec<(String, String)>);

/// Schemes in lower case, with their parameters.
fn schemes(field: &str) -> Vec<Scheme> {
    let mut all: Vec<Scheme> = Vec::new();
    let mut rest = field.trim_start_matches([' ', ',', '\t']);
    while !rest.is_empty() {
        let end = rest.find([' ', ',', '=', '\t']).unwrap_or(rest.len());
        let word = rest[..end].to_ascii_lowercase();
        rest = rest[end..].trim_start_matches([' ', '\t']);
        match rest.strip_prefix('=') {
            Some(value) => {
                let (text, behind) = value_of(value.trim_start_matches([' ', '\t']));
                if let Some((_, parameters)) = all.last_mut() {
                    parameters.push((word, text));
                }
                rest = behind;
            }
            None => all.push((word, Vec::new())),
        }
        rest = rest.trim_start_matches([' ', ',', '\t']);
    }
    all
}

/// A value, and what is behind it.
fn value_of(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find([' ', ',', '\t']).unwrap_or(text.len());
        return (text[..end].to_owned(), &text[end..]);
    };
    let mut value = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return (value, &quoted[at + 1..]),
            '\\' => value.extend(characters.next().map(|(_, next)| next)),
            _ => value.push(character),
        }
    }
    (value, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_preferred_and_nonsense_is_none() {
        let found = |fields: &[&'static str]| challenge(fields.iter().copied());
        let bearer = |realm: &str, service: Option<&str>, scope: Option<&str>| {
            let own = |text: &str| text.to_owned();
            let (service, scope) = (service.map(own), scope.map(own));
            Some(Challenge::Bearer(TokenService { realm: realm.to_owned(), service, scope }))
        };
        let usual =
            "Bearer realm=\"https://a/token\",service=\"r.io\",scope=\"repository:a/b:pull,push\"";
        let tokens = bearer("https://a/token", Some("r.io"), Some("repository:a/b:pull,push"));
        assert_eq!(found(&[usual]), tokens);
        assert_eq!(found(&["Basic realm=\"x\"", usual]), tokens);
        assert_eq!(
            found(&["basic realm=x, BEARER Realm = \"h\\\"\" , error=\"e\""]),
            bearer("h\"", None, None)
        );
        assert_eq!(found(&["Basic realm=\"x, Bearer realm=y\""]), Some(Challenge::Basic));
        for nonsense in [
            "",
            "=",
            "Bearer",
            "Bearer service=x",
            "\"",
            "Bearer realm",
            ",,, ,",
            "Negotiate abc==",
        ] {
            assert_eq!(found(&[nonsense]), None, "{nonsense}");
        }
        assert_eq!(found(&["Bearer realm=\"open"]), bearer("open", None, None));
    }
}
