// What Jira Cloud makes of pasted Markdown, as Atlassian's own editor reads it: one JSON document (ADF) on stdout.
// node jira.js REPORT.md; needs @atlaskit/editor-markdown-transformer and @atlaskit/adf-schema where node finds them.
"use strict";
const fs = require("fs");
const { MarkdownTransformer } = require("@atlaskit/editor-markdown-transformer");
const { defaultSchema } = require("@atlaskit/adf-schema/schema-default");

const text = fs.readFileSync(process.argv[2], "utf8");
console.log(JSON.stringify(new MarkdownTransformer(defaultSchema).parse(text).toJSON()));
