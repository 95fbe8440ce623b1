#include "serve/page.h"

namespace assay::serve {

const char* const kPage = R"html(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Assay</title>
<style>
  :root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
  body { max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }
  textarea, pre, input { font: inherit; box-sizing: border-box; }
  textarea { width: 100%; min-height: 9rem; }
  pre { white-space: pre-wrap; min-height: 6rem; border: 1px solid #8886; padding: .7rem; }
  label { display: inline-block; margin: .4rem 1rem .4rem 0; }
  label input { width: 6.5rem; }
  .prompt { opacity: .6; }
  #status { opacity: .7; }
</style>
</head>
<body>
<h1>Assay</h1>
<p id="model">…</p>
<textarea id="prompt" aria-label="prompt">Once upon a time</textarea>
<div>
  <label>tokens <input id="max_tokens" type="number" value="100" min="1"></label>
  <label>temperature <input id="temperature" type="number" value="0.8" min="0" step="0.1"></label>
  <label>top_p <input id="top_p" type="number" value="0.95" min="0.01" max="1" step="0.01"></label>
  <label>seed <input id="seed" type="number" placeholder="random"></label>
  <label>API key <input id="key" type="password" autocomplete="off"></label>
</div>
<p>
  <button id="go">Continue the text</button>
  <button id="stop" disabled>Stop</button>
  <span id="status"></span>
</p>
<pre id="out"></pre>
<script>
const $ = id => document.getElementById(id);
const headers = () => ({'Content-Type': 'application/json',
                        ...($('key').value ? {Authorization: 'Bearer ' + $('key').value} : {})});
let running = null;

async function showModel() {
  try {
    const answer = await fetch('v1/models', {headers: headers()});
    const body = await answer.json();
    $('model').textContent = answer.ok
      ? `${body.data[0].id}, at most ${body.data[0].max_model_len} tokens` : body.error.message;
  } catch (error) { $('model').textContent = 'The server cannot be reached.'; }
}

function show(prompt, text) {
  const first = document.createElement('span');
  first.className = 'prompt';
  first.textContent = prompt;
  $('out').replaceChildren(first, text);
}

async function generate() {
  const prompt = $('prompt').value, begin = performance.now();
  const request = {prompt, stream: true, max_tokens: +$('max_tokens').value,
                   temperature: +$('temperature').value, top_p: +$('top_p').value,
                   stream_options: {include_usage: true}};
  if ($('seed').value !== '') request.seed = +$('seed').value;
  running = new AbortController();
  $('go').disabled = true;
  $('stop').disabled = false;
  $('status').textContent = '';
  let text = '', rest = '';
  show(prompt, '');
  try {
    const answer = await fetch('v1/completions', {
      method: 'POST', headers: headers(), body: JSON.stringify(request), signal: running.signal});
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const {value, done} = await reader.read();
      if (done) break;
      const events = (rest + value).split('\n\n');
      rest = events.pop();
      for (const event of events) {
        if (event === 'data: [DONE]') continue;
        const body = JSON.parse(event.slice(6));
        if (body.error) throw new Error(body.error.message);
        if (body.choices.length) text += body.choices[0].text;
        if (body.usage) {
          const seconds = (performance.now() - begin) / 1000, count = body.usage.completion_tokens;
          $('status').textContent = `${count} tokens in ${seconds.toFixed(1)} s`;
        }
      }
      show(prompt, text);
    }
  } catch (error) {
    $('status').textContent = error.name === 'AbortError' ? 'stopped' : error.message;
  }
  $('go').disabled = false;
  $('stop').disabled = true;
}

$('go').onclick = generate;
$('stop').onclick = () => running.abort();
$('key').onchange = showModel;
showModel();
</script>
</body>
</html>
)html";

}  // namespace assay::serve
