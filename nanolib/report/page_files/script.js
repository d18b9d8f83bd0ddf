// What is picked at the top is followed by every chart and table; the choice is in the address.
const {specs, places, choices, picks} = page;
const main = document.querySelector('main');
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const views = {}, factors = {}, state = new URLSearchParams(location.hash.includes('=') ? location.hash.slice(1) : '');
const key = title => title.toLowerCase().replaceAll(' ', '-');

// Choices
function chosen() {
  const found = {};
  for (const [title, choice] of Object.entries(choices))
    if (Object.hasOwn(choice.options, state.get(key(title)))) found[title] = state.get(key(title));
  return found;
}
function kept(of) {
  const left = Object.fromEntries(picks.map(name => [name, null]));
  for (const [title, option] of Object.entries(of)) {
    const {pick, options} = choices[title];
    left[pick] = left[pick] ? left[pick].filter(value => options[option].includes(value)) : options[option];
  }
  return left;
}
const fits = (place, left) => picks.every((name, at) => left[name] === null || place[at] === null || left[name].includes(place[at]));
const options = (title, known) => Object.keys(choices[title].options).filter(option =>
  known.some(place => choices[title].options[option].includes(place[picks.indexOf(choices[title].pick)])));
const words = (title, option) => choices[title].pick === 'n' ? 'n = ' + option : option;
function nothing(known) {
  for (const [title, option] of Object.entries(chosen()))
    if (!known.some(place => fits(place, kept({[title]: option})))) {
      const which = choices[title].pick === 'n' ? 'lengths' : key(title) + 's';
      return `nothing ${choices[title].pick === 'n' ? 'at' : 'of'} ${words(title, option)} here; ${which}: ${options(title, known).join(', ')}`;
    }
  return 'nothing is left by these choices together';
}
const applying = known => Object.fromEntries(Object.entries(chosen()).filter(([title, option]) => options(title, known).includes(option)));
function told(element, text) {
  element.hidden = !text;
  element.textContent = text;
}
function follow() {
  const left = kept(chosen());
  for (const section of all('section[data-asked]')) {
    const figures = all('figure', section), known = figures.flatMap(figure => places[figure.id.slice(6)]);
    for (const count of all('.count', section)) {
      const rows = all('tr[data-place]', count.closest('details')), of = rows.map(row => JSON.parse(row.dataset.place));
      rows.forEach((row, at) => { row.hidden = !fits(of[at], left); });
      const shown = rows.filter(row => !row.hidden).length;
      count.textContent = shown < rows.length ? `(${shown} of ${rows.length})` : '';
      known.push(...of);
    }
    const none = known.length && !known.some(place => fits(place, left)) ? nothing(known) : '';
    told(section.querySelector('.none'), none);
    section.querySelector('.answers').hidden = Boolean(none);
    section.querySelector('.overall').hidden = !Object.keys(chosen()).length;
    const short = document.querySelector(`#short [data-of="${section.id}"]`);
    short.querySelector('.verdict-line').hidden = Boolean(none);
    told(short.querySelector('.none'), none);
    for (const figure of figures) {
      const mine = places[figure.id.slice(6)];
      const empty = mine.length && !mine.some(place => fits(place, left)) ? nothing(mine) : '';
      told(figure.querySelector('.none'), empty);
      figure.querySelector('.scroll').hidden = Boolean(empty);
      figure.querySelector('.picked').textContent = Object.entries(applying(mine)).map(([title, option]) => ' · ' + words(title, option)).join('');
    }
  }
  return Promise.all(Object.entries(views).map(([name, view]) => {
    for (const pick of picks)
      try { view.signal('pick_' + pick, left[pick]); } catch { continue; }  // a chart whose data do not know it
    return view.runAsync().then(() => unrole(name));
  }));
}
function remember() {
  history.replaceState(null, '', state.size ? '#' + state : location.pathname + location.search);
}
function fillPicks() {
  const bar = document.getElementById('picks'), picked = chosen();
  all('label', bar).forEach(label => label.remove());
  for (const [title, choice] of Object.entries(choices)) {
    const label = document.createElement('label'), select = document.createElement('select');
    label.append(title + ' ', select);
    for (const name of ['all', ...Object.keys(choice.options)]) select.add(new Option(name, name));
    select.value = picked[title] ?? 'all';
    select.onchange = () => {
      if (select.selectedIndex) state.set(key(title), select.value); else state.delete(key(title));
      remember();
      follow();
    };
    bar.append(label);
  }
}

// Charts, for the width that there is
const rooms = () => Math.floor(main.clientWidth);
const isNarrow = room => room < 768;
function across(node) {
  const sum = list => list.reduce((total, one) => total + across(one), 0);
  if (node.hconcat) return sum(node.hconcat);
  if (node.vconcat) return Math.max(...node.vconcat.map(across));
  if (node.concat) {
    const columns = node.columns || node.concat.length, widths = [];
    for (let at = 0; at < node.concat.length; at += columns) widths.push(sum(node.concat.slice(at, at + columns)));
    return Math.max(...widths);
  }
  return typeof node.width === 'number' ? node.width : 0;
}
function widen(node, factor) {
  for (const part of node.hconcat || node.vconcat || node.concat || []) widen(part, factor);
  if (typeof node.width === 'number') node.width = Math.round(node.width * factor);
  if (typeof node.height === 'number' && factor > 1) node.height = Math.round(node.height * Math.sqrt(factor));
}
function stack(node) {
  for (const part of node.hconcat || node.vconcat || node.concat || []) stack(part);
  if (node.hconcat) { node.vconcat = node.hconcat; delete node.hconcat; }
  if (node.concat) node.columns = 1;
}
function dressed(name, room, factor) {
  const {datasets, ...rest} = specs[name], spec = {...structuredClone(rest), datasets}, left = kept(chosen());
  if (isNarrow(room)) {
    stack(spec);
    spec.config.legend = {...spec.config.legend, columns: 2};
    spec.config.axisY = {...spec.config.axisY, labelLimit: 130};
  }
  widen(spec, factor);
  for (const param of spec.params || []) if (param.name.startsWith('pick_')) param.value = left[param.name.slice(5)];
  return {...spec, description: describe(name)};
}
function describe(name) {
  const figure = document.getElementById('chart-' + name);
  const said = figure.closest('section').querySelector('.verdict li');
  return figure.querySelector('figcaption').innerText.replace(/\s+/g, ' ') + (said ? ' ' + said.innerText : '');
}
const embed = (target, spec) => vegaEmbed(target, spec, {mode: 'vega-lite', renderer: 'svg', actions: false});
function unrole(name) {  // Vega gives a role to groups of marks that have no name
  for (const group of all(`#chart-${name} [role=graphics-symbol]:not([aria-label])`)) group.removeAttribute('role');
}
async function draw(name) {
  const figure = document.getElementById('chart-' + name), target = figure.querySelector('.plot');
  const room = rooms(), layout = name + room, left = JSON.stringify(kept(chosen()));
  try {
    const known = layout in factors;
    views[name]?.finalize();
    let result = await embed(target, dressed(name, room, factors[layout] ?? 1));
    const inner = across(specs[name]) && across(dressed(name, room, 1));
    for (let tries = 0; inner && !known && tries < 3; tries++) {  // what stands beside the panels changes a little with them
      const whole = target.querySelector('svg.marks').width.baseVal.value, beside = whole - inner * (factors[layout] ?? 1);
      const factor = Math.min(1.8, Math.max(0.35, (room - beside - 4) / inner));
      if (Math.abs(factor / (factors[layout] ?? 1) - 1) < 0.02 && whole <= room) break;
      factors[layout] = factor;
      result.finalize();
      result = await embed(target, dressed(name, room, factor));
    }
    views[name] = result.view;
    if (JSON.stringify(kept(chosen())) !== left) await follow();  // picked while it was drawn
    unrole(name);
  } catch (error) {
    told(figure.querySelector('.none'), 'this chart could not be drawn: ' + error.message);
    throw error;
  }
}
let drawing = 0;
async function drawAll() {
  const mine = ++drawing, names = Object.keys(specs);
  const hidden = name => Boolean(document.getElementById('chart-' + name).closest('details'));
  document.body.dataset.drawn = 0;
  for (const name of [...names.filter(name => !hidden(name)), ...names.filter(hidden)]) {
    await draw(name);
    if (mine !== drawing) return;  // a newer width has begun
    document.body.dataset.drawn = Number(document.body.dataset.drawn) + 1;
    await new Promise(done => (window.requestIdleCallback || setTimeout)(done, {timeout: 50}));
  }
}

// Address, print
function goTo(id) {
  const target = document.getElementById(id);
  for (const one of target ? all('details', target).slice(0, id === 'method' ? 1 : 0) : []) one.open = true;
  target?.scrollIntoView();
}
for (const link of all('a[href^="#"]'))
  link.onclick = event => {
    event.preventDefault();
    state.set('at', link.hash.slice(1));
    remember();
    goTo(link.hash.slice(1));
  };
addEventListener('hashchange', () => {
  const given = location.hash.includes('=') ? new URLSearchParams(location.hash.slice(1)) : new URLSearchParams({at: location.hash.slice(1)});
  for (const name of [...state.keys()]) state.delete(name);
  for (const [name, value] of given) state.set(name, value);
  fillPicks();
  follow();
  if (state.get('at')) goTo(state.get('at'));
});
let wide = rooms(), waiting;
new ResizeObserver(() => {
  clearTimeout(waiting);
  waiting = setTimeout(() => { if (Math.abs(rooms() - wide) > 16) { wide = rooms(); drawAll(); } }, 150);
}).observe(main);
let closed = [];
addEventListener('beforeprint', () => { closed = all('details:not([open])', main); closed.forEach(one => { one.open = true; }); });
addEventListener('afterprint', () => closed.forEach(one => { one.open = false; }));

fillPicks();
follow();
drawAll();
if (state.get('at')) goTo(state.get('at'));
