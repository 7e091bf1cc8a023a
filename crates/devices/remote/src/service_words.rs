//! What services say in the bodies of responses that are no success.

/// The words of a service in the body of a response.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ServiceWords {
    pub(crate) code: Option<String>,
    pub(crate) message: Option<String>,
    pub(crate) region: Option<String>,
}

impl ServiceWords {
    /// The words in XML, as S3 and Azure have them, or in JSON, as Google has them. Other text, such as a page of a
    /// proxy, has none.
    pub(crate) fn of(text: &str) -> ServiceWords {
        let element = |name: &str| {
            let (_, rest) = text.split_once(&format!("<{name}>"))?;
            rest.split_once(&format!("</{name}>")).map(|(text, _)| text.to_owned())
        };
        let Ok(json) = serde_json::from_str::<serde_json::Value>(text) else {
            let (code, message) = (element("Code"), element("Message"));
            return ServiceWords { code, message, region: element("Region") };
        };
        let member = |name: &str| json["error"][name].as_str().map(str::to_owned);
        let reason = json["error"]["errors"][0]["reason"].as_str().map(str::to_owned);
        let code = reason.or_else(|| member("status"));
        ServiceWords { code, message: member("message"), region: None }
    }

    /// Text for an error: plain text as it is; of other formats code and message alone, if they have any.
    pub(crate) fn brief(text: &str) -> String {
        let text = text.trim_start();
        if !text.starts_with(['<', '{']) {
            return text.to_owned();
        }
        let ServiceWords { code, message, .. } = ServiceWords::of(text);
        [code, message].into_iter().flatten().collect::<Vec<_>>().join(": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_a_service_are_found_in_its_format() {
        let words = |code: &str, message: &str| ServiceWords {
            code: Some(code.to_owned()),
            message: Some(message.to_owned()),
            region: None,
        };
        let xml = "<?xml?><Error><Code>NoSuchKey</Code><Message>There is none.</Message></Error>";
        assert_eq!(ServiceWords::of(xml), words("NoSuchKey", "There is none."));
        let json =
            r#"{"error":{"code":404,"message":"Not Found","errors":[{"reason":"notFound"}]}}"#;
        assert_eq!(ServiceWords::of(json), words("notFound", "Not Found"));
        let json = r#"{"error":{"code":403,"message":"No","status":"PERMISSION_DENIED"}}"#;
        assert_eq!(ServiceWords::of(json), words("PERMISSION_DENIED", "No"));
        for other in ["<html><body><h1>502 Bad Gateway</h1></body></html>", "", "[]", "7", "{"] {
            assert_eq!(ServiceWords::of(other), ServiceWords::default(), "{other}");
        }
    }

    #[test]
    fn pages_say_nothing_and_text_says_all() {
        assert_eq!(ServiceWords::brief("no such disk"), "no such disk");
        assert_eq!(ServiceWords::brief("<!doctype html><title>502 Bad Gateway</title>"), "");
        let xml = "<Error><Code>NoSuchKey</Code><Message>There is none</Message></Error>";
        assert_eq!(ServiceWords::brief(xml), "NoSuchKey: There is none");
        assert_eq!(ServiceWords::brief(r#"{"error":{"message":"No"}}"#), "No");
    }
}
